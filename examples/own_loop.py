"""A plain PyTorch loop around `sw.FSDP`, with checkpoints from which it continues.

python examples/own_loop.py            six steps; then three, and a second program with three more

The checkpoint has the weights, the optimizer's state, and in `extra` what the loop itself needs:
the step and the scheduler. It loads on any number of ranks, and under `sw.DDP` too.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import shardwise as sw


def build() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
    )


def train(steps: int, folder: str, resume: bool = False) -> list[float]:
    """Train on all ranks until step `steps`; the losses of this rank's rows."""
    world = sw.init()
    model = sw.FSDP(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    first = 0
    if resume:
        extra = sw.load(model, folder, optimizer=optimizer)
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]

    losses: list[float] = []
    for step in range(first, steps):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        x = rows.tensor_split(world.size)[world.rank]
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    extra = {"step": steps, "schedule": schedule.state_dict()}
    sw.save(model, folder, extra=extra, optimizer=optimizer, keep=1)
    world.close()
    return losses


def compare(folder: Path) -> tuple[list[float], list[float]]:
    """The losses of rank 0 in six steps, and in three steps and three after a restart."""
    through = sw.spawn(train, ranks=2, args=(6, str(folder / "through")))[0]
    begun = sw.spawn(train, ranks=2, args=(3, str(folder / "resumed")))[0]
    resumed = sw.spawn(train, ranks=2, args=(6, str(folder / "resumed"), True))[0]
    return through, [*begun, *resumed]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        chosen = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for step, (one, two) in enumerate(zip(*compare(chosen), strict=True), start=1):
            print(f"step {step}: in one run {one:.6f}, resumed after step 3 {two:.6f}")
