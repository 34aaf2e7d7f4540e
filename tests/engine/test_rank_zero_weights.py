"""Weights that rank 0 alone has, the other ranks' model being on the meta device."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine import rank_zero_weights
from shardwise.models import gpt
from shardwise.models.initial import fill
from tests.engine.cases import CONFIG, refusal, settled, share, text
from tests.engine.zoo import Buffered
from tests.pool import run_gloo, run_threads


def made(rank: int, real: tuple[int, ...]) -> nn.Module:
    if rank in real:
        return settled(Buffered().double())
    with torch.device("meta"):
        return Buffered().double()


WRAPS: dict[str, Callable[[nn.Module, World], nn.Module]] = {
    "ddp": lambda module, world: sw.DDP(module, world=world),
    "zero2": lambda module, world: sw.FSDP(module, "SHARD_GRAD_OP", world=world),
    "zero3": lambda module, world: sw.FSDP(module, units=1, world=world),
    "offload": lambda module, world: sw.FSDP(module, units=1, world=world, cpu_offload=True),
    "pipe": lambda module, world: sw.Pipe(module, 2, world=world),
}


def loop(world: World, wrap: str, real: tuple[int, ...]) -> list[float]:
    torch.set_num_threads(1)
    model = WRAPS[wrap](made(world.rank, real), world)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(x).mul(x).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_plain_loop(wrap: str):
    """Parameters, tied ones and buffers too, train as if every rank had them."""
    assert run_threads(2, loop, wrap, (0,)) == run_threads(2, loop, wrap, (0, 1))


def test_some_ranks_have_them_too():
    """Rank 0's weights count, on ranks that have others too."""
    assert run_threads(3, loop, "zero3", (0, 2)) == run_threads(3, loop, "zero3", (0, 1, 2))


def refused(world: World, wrap: str) -> str:
    return refusal(lambda: loop(world, wrap, (1,)))


@pytest.mark.parametrize("wrap", WRAPS)
def test_not_on_rank_zero(wrap: str):
    """Weights on another rank than 0 are an error that names one, on every rank."""
    for said in run_threads(2, refused, wrap):
        assert re.search(r"scale and \d+ more on the meta device on rank 0, and not", said)


def engine_losses(world: World, plan: str, real: tuple[int, ...]) -> list[float]:
    torch.set_num_threads(1)
    if world.rank in real:
        model = gpt.GPT(CONFIG)
        fill(model, seed=5)
    else:
        with torch.device("meta"):
            model = gpt.GPT(CONFIG)
    engine = sw.parallelize(
        model, plan, world, optimizer=sw.AdamW(lr=0.01), loss=gpt.loss, tokens=gpt.tokens
    )
    mine = partial(share, rank=engine.data_rank, ranks=engine.data_ranks)
    return [engine.step(mine(text(step))).loss for step in range(2)]


PLANS = {
    2: (
        *("dp2 ddp bf16", "dp2 zero1", "dp2 zero3 tile:2", "dp2 zero2 offload:optim"),
        *("dp2 zero3 offload:param", "tp2 sp", "pp2 1f1b:2"),
    ),
    4: ("dp2 pp2 zero3 1f1b:2", "dp2 tp2 zero1", "dp_replicate2 dp_shard2 zero3"),
}


@pytest.mark.parametrize("plan", [plan for plans in PLANS.values() for plan in plans])
def test_an_engine(plan: str):
    """Under every row, and on the axes of tensors and stages, each rank gets its part."""
    ranks = next(count for count, plans in PLANS.items() if plan in plans)
    every = tuple(range(ranks))
    assert run_threads(ranks, engine_losses, plan, (0,)) == run_threads(
        ranks, engine_losses, plan, every
    )


def largest(world: World, _: None) -> int:
    """The bytes of the largest message of weights."""
    alive: list[Tensor] = []
    sent = rank_zero_weights._send

    def watched(x: Tensor, axis: object) -> None:
        alive.append(x)
        sent(x, axis)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_zero_weights, "_send", watched)
        loop(world, "zero3", (0,))
    return max(x.nbytes for x in alive)


def test_one_parameter_at_a_time():
    """No message is larger than one parameter."""
    assert run_gloo(2, largest, None) == [36 * 8, 36 * 8]


def tagged(world: World, wrap: str) -> list[bool]:
    """Whether each parameter of this rank has an attribute that it had before the wrapping."""
    model = made(world.rank, (0,))
    for p in model.parameters():
        p.decays = False  # type: ignore[attr-defined]
    return [hasattr(p, "decays") for p in WRAPS[wrap](model, world).parameters()]


@pytest.mark.parametrize("wrap", WRAPS)
def test_attributes_of_parameters_stay(wrap: str):
    """Parameters keep their attributes, where their weights are sent and where they arrive."""
    assert all(map(all, run_threads(2, tagged, wrap)))
