"""Models, optimizers, boxes and faults for the tests of checkpoints.

Each cut of a tensor gives, for rank r of n, the boxes that it holds of it:

    flat      block r of the row-major elements, padded to n equal ones: ragged boxes, some empty
    dim       block r of the longest dim, as even as it goes
    copies    all of it on every rank
    hybrid    the flat cut for n/2 ranks, twice
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.folder import all_in, clear, unfinished
from shardwise.checkpoint.save import PlannedSave, publish, write_pieces
from shardwise.checkpoint.save_plans import PIECE_BYTES, BoxSavePlanner
from shardwise.comm.world import World
from shardwise.core.layouts.flatten import boxes as flat_boxes
from shardwise.engine.state.box import Box

Block = tuple[tuple[int, ...], tuple[int, ...]]
ADAM = sw.AdamW(lr=0.02, weight_decay=0.1)


class Own(Optimizer):
    """An elementwise optimizer whose states are numbers, a tuple, a list of tensors and counts."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.5, 0.1)):
        super().__init__(params, {"lr": lr, "betas": betas, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"], state["past"], state["span"] = 0, [], (0, None)
                    state["ups"] = torch.zeros(p.shape, dtype=torch.int32)
                    state["weight"] = torch.ones(1)
                state["count"] += 1
                state["span"] = (state["count"], None)
                state["past"] = [*state["past"], p.grad.clone()][-2:]
                state["ups"] += (p.grad > 0).int()
                state["weight"] *= 0.9
                mean = sum(b * g for b, g in zip(group["betas"], state["past"], strict=False))
                move = (mean + 1e-3 * state["ups"]) * (1 + state["weight"].to(p))
                p.sub_(group["lr"] / state["span"][0] ** 0.5 * move)


class Counted(nn.Module):
    """A layer with a buffer, and with Python state that it gives as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 7), 0
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        """The scale depends on the number of calls in training."""
        y = self.layer(x)
        if self.training:
            self.calls += 1
            self.seen += 1
        return y * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "at": (torch.full((2,), self.calls), None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert state["at"][1] is None and state["at"][0].eq(self.calls).all()


class Sum(nn.Module):
    """A chain whose third layer is used, and has gradients, from step 3 on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(*sizes) for sizes in ((7, 7), (7, 5), (5, 3)))
        self.chain = nn.Sequential(Counted(), nn.Tanh(), *layers).double()

    def forward(self, x: Tensor, late: int) -> Tensor:
        first, act, branch, second, last = self.chain
        h = act(first(x))
        return last(second(h + branch(h) if late else h))


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def rows(step: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=own, dtype=torch.float64)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(*batch) if isinstance(batch, tuple) else model(batch)).square().mean()


def engine_of(
    world: World, plan: str, model: nn.Module | None = None, optimizer: Any = ADAM, **options: Any
) -> sw.Engine:
    model = chain() if model is None else model
    return sw.parallelize(model, plan, world, optimizer=optimizer, loss=squares, **options)


def steps(engine: sw.Engine, first: int, count: int = 3) -> list[float]:
    parts = [rows(k).tensor_split(engine.data_ranks) for k in range(first, first + count)]
    return [engine.step(part[engine.data_rank]).loss for part in parts]


# --- boxes --------------------------------------------------------------------------------------


def blocks(cut: str, shape: Sequence[int], rank: int, ranks: int) -> list[Block]:
    if cut == "hybrid":
        half = max(1, ranks // 2)
        return blocks("flat", shape, rank % half, half)
    offsets, sizes = [0] * len(shape), list(shape)
    numel = math.prod(shape)
    if cut == "flat" and numel:
        length = -(-numel // ranks)
        start, stop = (min(numel, length * r) for r in (rank, rank + 1))
        return [(box.offsets, box.sizes) for box in flat_boxes(shape, start, stop)]
    if cut == "dim" and shape:
        longest = max(range(len(shape)), key=lambda d: shape[d])
        start, stop = (shape[longest] * r // ranks for r in (rank, rank + 1))
        offsets[longest], sizes[longest] = start, stop - start
    elif cut != "copies" and rank:
        return []
    return [(tuple(offsets), tuple(sizes))]


def boxes_of(tensors: Mapping[str, Tensor], cut: str, rank: int, ranks: int) -> list[Box]:
    replica = {"copies": rank, "hybrid": rank // max(1, ranks // 2)}.get(cut, 0)
    found = []
    for name, whole in tensors.items():
        shape = tuple(whole.shape)
        for offsets, sizes in blocks(cut, shape, rank, ranks):
            block = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            found.append(
                Box(name, shape, offsets, sizes, whole[block].clone().view(sizes), replica)
            )
    return found


def sample(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random content of any dtype, exact in it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def save_by_all(
    folder: Path,
    boxes: Sequence[Sequence[Box]],
    scalars: dict[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> list[int]:
    """What the ranks of a save do, one by one; the number of pieces that each rank wrote."""
    planners = [BoxSavePlanner(held, piece_bytes) for held in boxes]
    writers = [FileSystemWriter(unfinished(folder, scalars["step"])) for _ in boxes]
    local = [planner.create_local_plan() for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    clear(Path(writers[0].path))
    plans = writers[0].prepare_global_plan(plans)
    written = [write_pieces(*each) for each in zip(writers, plans, planners, strict=True)]
    publish(writers[0], scalars, metadata, written)
    return [len(plan.items) for plan in plans]


# --- faults -------------------------------------------------------------------------------------


@contextmanager
def writing(act: Callable[[PlannedSave], object]) -> Iterator[None]:
    """Call `act` before each rank of this process writes."""
    write = PlannedSave.write

    def after(save: PlannedSave) -> Any:
        act(save)
        return write(save)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedSave, "write", after)
        yield


def refuse(rank: int, save: PlannedSave) -> None:
    """A disk that is full for a rank."""
    if save.world.rank == rank:
        raise OSError(28, "No space left on device")


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """A limit of this process, such as resource.RLIMIT_AS."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def dies(act: Callable[[], object], count: int, folder: Path) -> bool:
    """Act in a process that ends, as if the power failed, at the count-th act on the folder."""
    acts = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
    seen = [0]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in acts and (str(folder) in str(args[0]) or isinstance(args[0], int)):
            seen[0] += 1
            if seen[0] == count:
                os._exit(9)

    child = os.fork()
    if child == 0:
        sys.addaudithook(watch)
        act()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def names(folder: Path) -> list[str]:
    """The checkpoints of a folder."""
    return [path.name for path in all_in(folder)]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
