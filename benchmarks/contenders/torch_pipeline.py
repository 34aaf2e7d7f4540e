"""PyTorch's own pipelines (torch.distributed.pipelining) as contenders, with the same partition.

                 stages of the model         rank of a stage, on p ranks
    gpipe 1f1b zb-h1     p                   stage s on rank s
    interleaved bfs      p·v                 stage s on rank s mod p
    zb-v dualpipe-v      2p                  down the ranks, and back: rank r has r and 2p - 1 - r

Stages are built by hand, as torch's manual recommends for models that are not a plain sequence. A
schedule splits the global batch itself. The loss is the mean over a microbatch, and `scale_grads`
converts the gradients to those of the mean over the batch. Outputs are not merged.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional

from benchmarks.contenders.contender import Batch, Contender, Loop, Setup, adamw
from benchmarks.contenders.ours import SCHEDULES
from shardwise.core.schedule.library import build as schedule_of
from shardwise.models.gpt import GPT, rotation
from shardwise.techniques.pipeline.partition import starts

#: Torch's class for each of our schedules. ZB-H1 is torch's ZB1P with one stage per rank.
CLASSES: Final = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
SINGLE: Final = ("gpipe", "1f1b")  # the classes that take a stage, not a list of them


class Part(nn.Module):
    """One stage: tokens or the residual stream in, the residual stream or logits out.

    Parameters keep the modules' own names below `parts`; the rotation is made in every stage.
    """

    def __init__(self, model: GPT, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.head_width = model.config.head_width
        self.embed = model.embed if first else None
        self.parts = nn.ModuleList(model.blocks[block] for block in blocks)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] (first stage) or x [B, T, D] to x, or to logits [B, T, V] (last stage)."""
        x_BTD = x if self.embed is None else self.embed(x)
        turn = rotation(x_BTD.shape[1], self.head_width, x_BTD)
        for block in self.parts:
            x_BTD = block(x_BTD, turn)
        if self.norm is None or self.head is None:
            return x_BTD
        return self.head(self.norm(x_BTD))


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy, the mean over all targets of a microbatch."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def scheduled(word: str) -> Callable[[nn.Module, Setup], Loop]:
    """Torch's schedule for a plan word."""
    name = word.partition(":")[0]

    def build(model: nn.Module, setup: Setup) -> Loop:
        """This rank's stages under the schedule."""
        assert isinstance(model, GPT)
        plan = schedule_of(word, setup.ranks)
        mine = plan.stages(get_rank())
        stages = [
            PipelineStage(part(model, stage, len(plan.home)), stage, len(plan.home), setup.device)
            for stage in mine
        ]
        made = getattr(pipelining.schedules, CLASSES[name])(
            stages[0] if name in SINGLE else stages, plan.microbatches, mean_loss
        )
        optimizer = adamw([p for stage in stages for p in stage.submod.parameters()])
        return Loop(stepping(made, optimizer, 0 in mine, len(plan.home) - 1 in mine))

    return build


def part(model: GPT, stage: int, stages: int) -> Part:
    """Stage `stage` of `stages`, with the same partition as ours."""
    numbers = [int(start.split(".")[1]) for start in starts(model, stages)]
    ends = [0, *numbers, model.config.layers]
    return Part(model, range(*ends[stage : stage + 2]), stage == 0, stage == stages - 1)


def stepping(
    schedule: Any, optimizer: torch.optim.Optimizer, first: bool, last: bool
) -> Callable[[Batch], float | None]:
    """The step of a rank that has the first stage, the last, both or neither."""

    def step(batch: Batch) -> float | None:
        """The mean loss on the rank with the last stage, else None."""
        losses: list[Tensor] = []
        given = (batch["inputs"],) if first else ()
        wanted: dict[str, Any] = {"target": batch["targets"], "losses": losses} if last else {}
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return step


PEERS = tuple(
    Contender(f"torch {word}", word, scheduled(word), whole_batch=True, against=f"torch {word}")
    for word in SCHEDULES
)
