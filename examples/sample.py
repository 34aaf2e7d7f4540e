"""Text that the model writes at the end of a run: a callback, for `data.tokens = "bytes"`.

shardwise train examples/quickstart.toml --set run.callbacks=examples/sample.py:make
"""

import torch

import shardwise as sw

SEPARATOR, LENGTH, WINDOW = 256, 100, 32


class Sample(sw.callbacks.Callback):
    """A hundred bytes after the end of a document, drawn one by one."""

    all_ranks = True  # each forward pass of a sharded model needs them

    def run_began(self, run: sw.callbacks.RunFacts) -> None:
        """Keep the engine."""
        self.rank, self.engine = run.rank, run.engine

    def run_ended(self, error: BaseException | None) -> None:
        """Draw the bytes, the same on all ranks, and print them on rank 0."""
        if error is not None or self.engine is None:
            return
        chance, seen = torch.Generator().manual_seed(0), [SEPARATOR]
        like = torch.zeros(SEPARATOR + 1, device=self.engine.world.device)
        for _ in range(LENGTH):
            tokens = torch.tensor([seen[-WINDOW:]], device=like.device)
            logits = self.engine.outputs(lambda model, t=tokens: model(t)[0, -1].float(), like)
            seen.append(int(torch.multinomial(logits.cpu().softmax(0), 1, generator=chance)))
        if self.rank == 0:
            print(bytes(n for n in seen if n != SEPARATOR).decode(errors="replace"))


def make() -> Sample:
    """The callback of a run."""
    return Sample()
