"""The suite `tensor` on a model of no size: who trains the same model, and what has to be sent."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import table
from benchmarks.__main__ import bench_command
from benchmarks.contenders.contender import Setup, Task
from benchmarks.contenders.roster import ROSTER, SUITES, choose
from benchmarks.least import least_bytes
from benchmarks.measure import Record, measure
from benchmarks.meters.live_bytes import LiveBytes
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.layouts.layout import P, R, S
from shardwise.core.moves import price
from shardwise.core.zero import ROWS
from shardwise.models import gpt
from shardwise.models.gpt import SIZES, GPTConfig
from shardwise.models.registry import of_gpt
from tests.pool import run_gloo

MICRO = GPTConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, sequence=8)
TORCH = ("torch TP", "torch TP + SP", "torch TP without loss parallelism", "torch DDP")
TASK = Task("micro", MICRO, SUITES["tensor"], rows=4, rounds=1, warm_up=1)


def measured(world: World, task: Task) -> list[Record]:
    return measure(task)


@pytest.mark.full
def test_everyone_trains_the_same_model() -> None:
    """Every loss is torch DDP's, with few key heads as well; who is refused says so."""
    rows = {row.contender: row for row in table.lines(TASK, run_gloo(2, measured, TASK))}
    assert tuple(rows) == SUITES["tensor"]
    assert rows["torch TP"].ratio == 1.0
    for name in TORCH:
        assert rows[name].note == "" or rows[name].note.endswith("after its time was taken")
    for name, row in rows.items():
        refused = name not in TORCH and row.note.startswith("InputError: ")
        loss = None if refused else pytest.approx(rows["torch DDP"].loss, rel=1e-5)
        assert row.loss == loss


#: what functional collectives do, by their names
MOVES = {
    "_c10d_functional::all_reduce": (P, R),
    "_c10d_functional::reduce_scatter_tensor": (P, S(0)),
    "_c10d_functional::all_gather_into_tensor": (S(0), R),
}


class Sent(TorchDispatchMode):
    """Adds up the least bytes that the collectives asked for have to send, a rank in fp32."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.bytes = ranks, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.name() in MOVES:
            src, dst = MOVES[func.name()]
            numel = args[0].numel() * (self.ranks if src == S(0) else 1)
            self.bytes += price(src, dst, numel, self.ranks).sent * 4
        return func(*args, **(kwargs or {}))


def sent_bytes(world: World, name: str) -> float:
    """What a contender asks to be sent in its second step."""
    batch = of_gpt("micro", MICRO).batch(TASK.rows, 0)
    setup = Setup(gpt.loss, gpt.Block, world.size, world.device)
    loop = ROSTER[name].build(of_gpt("micro", MICRO).build(), setup)
    loop.step(batch)
    with Sent(world.size) as sent:
        loop.step(batch)
    return sent.bytes


def test_torch_asks_for_the_least() -> None:
    """PyTorch's plain TP and TP + SP move what the arithmetic says; gathered logits come on top."""
    sent = [run_gloo(2, sent_bytes, name) for name in TORCH[:3]]
    tokens = TASK.rows * MICRO.sequence
    least = least_bytes("tp", TASK, 2)
    gathered = least + (tokens * MICRO.vocabulary // 2 - 3 * tokens) * 4
    assert sent == [[least] * 2, [least_bytes("tp sp", TASK, 2)] * 2, [gathered] * 2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", ["tiny", "small"])
def test_the_least_bytes_are_the_papers(size: str, ranks: int) -> None:
    """4L + 2 all-reduces of [B, T, D] and three of [B, T]; with `sp` the norms' gradients too."""
    config = SIZES[size]
    tokens, width, layers = 8 * config.sequence, config.width, config.layers
    numel = (4 * layers + 2) * tokens * width + 3 * tokens
    task = Task(size, config, TORCH)
    assert least_bytes("tp", task, ranks) == 2 * numel * (ranks - 1) // ranks * 4
    more = 2 * (2 * layers + 1) * width * (ranks - 1) // ranks * 4
    assert least_bytes("tp sp", task, ranks) == least_bytes("tp", task, ranks) + more


def gathered_inside(world: World) -> int:
    """The peak while a DTensor gathers 8000 bytes for itself, to make as many of them."""
    mesh = init_device_mesh("cpu", (world.size,))
    local = torch.zeros(1000)
    live = LiveBytes()
    live.watch(local)
    with live:
        made = DTensor.from_local(local, mesh, [Shard(0)]).softmax(dim=0)
    assert isinstance(made, DTensor) and made.placements == (Replicate(),)
    return live.peak_bytes


def test_what_a_dtensor_makes_for_itself_is_live() -> None:
    """A temporary inside another library's tensor class counts as any other."""
    assert all(peak_bytes >= 4000 + 8000 + 8000 for peak_bytes in run_gloo(2, gathered_inside))


def test_a_suite_has_its_own_contenders_and_reference() -> None:
    """In `tensor` torch TP always runs; the rows of the states table are of `data`."""
    assert choose("tensor", ["tp-sp"]) == ("torch TP", "tp sp")
    assert not {*SUITES["tensor"]} & {*ROWS}
    with pytest.raises(InputError, match='benchmarks tensor "tp"'):
        choose("tensor", ["ttp"])
    assert all(name in ROSTER for names in SUITES.values() for name in names)


@pytest.mark.parametrize(
    ("words", "device", "instead"),
    [
        (["tensors"], "cpu", "python -m benchmarks tensor"),
        (["tensor"], "cuda", "benchmarks tensor --device cpu"),
    ],
)
def test_a_suite_that_cannot_be_is_refused(words: list[str], device: str, instead: str) -> None:
    """A misspelt suite, and one rank where several are what is measured."""
    with pytest.raises(InputError, match=instead):
        bench_command(words, device=device)
