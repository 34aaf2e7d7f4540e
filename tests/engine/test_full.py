"""sw.full_state_dict: what a plain module takes, on rank 0, from any way of training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.engine.state import full
from tests.engine import loops
from tests.engine.cases import Case, build, difference, oracle, settled, share
from tests.engine.loops import wrap
from tests.engine.tensors import ADAMW, gpt_task, made
from tests.engine.zoo import Buffered
from tests.pool import run_gloo, run_threads

State = dict[str, Tensor]


def model() -> nn.Module:
    return settled(Buffered()).double()


def ways(world: World, how: str) -> tuple[State, list[str]]:
    """The state after two steps, and the keys that this rank's own state_dict has."""
    module = model()
    module = sw.Pipe(module, 1, world=world) if how == "Pipe" else wrap(how, module, world)
    rank = 0 if how == "Pipe" else world.rank
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optim.zero_grad()
        module(loops.rows(step, rank)).square().mean().backward()
        optim.step()
    state = sw.full_state_dict(module)
    module(loops.rows(5, rank)).square().mean().backward()  # copies: training goes on
    optim.step()
    return state, list(module.state_dict())


WAYS = ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "Pipe"]


def by_hand(how: str, ranks: int) -> tuple[State, nn.Module]:
    """The plain loop; of data ranks' running statistics those are kept that rank 0 made."""
    plain = model()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optim.zero_grad()
        before = {name: b.clone() for name, b in plain.named_buffers()}
        for rank in reversed(range(1 if how == "Pipe" else ranks)):
            plain.load_state_dict(before, strict=False)
            loss = plain(loops.rows(step, rank)).square().mean()
            (loss if how == "Pipe" else loss / ranks).backward()
        optim.step()
    return plain.state_dict(), plain


@pytest.mark.parametrize("how", WAYS)
def test_a_plain_module_takes_the_full_state_of_a_wrapped_one(how: str):
    """All keys in their order, tied ones twice, buffers too; other ranks have nothing."""
    ranks = 4 if how == "HYBRID_SHARD" else 2
    runner = run_gloo if how in ("FULL_SHARD", "Pipe") else run_threads
    (state, keys), *others = runner(ranks, ways, how)
    expected, plain = by_hand(how, ranks)
    assert [own for own, _ in others] == [{}] * (ranks - 1)
    assert list(state) == list(expected)
    if how == "Pipe":
        assert set(keys) < set(expected)
    for name, value in state.items():
        assert value.device.type == "cpu"
        assert value.dtype == expected[name].dtype
        assert value.shape == expected[name].shape
        assert difference(value, expected[name]) <= 1e-10, name
    assert state["leave.weight"] is state["enter.weight"]
    fresh = Buffered().double()
    fresh.load_state_dict(state)
    x = loops.rows(7, 0)
    with torch.no_grad():
        assert difference(fresh.eval()(x), plain.eval()(x)) <= 1e-10


PLANS = [
    *("dp2 ddp", "dp2 zero1", "dp2 zero3", "dp_replicate2 dp_shard2 zero3", "tp2", "tp2 sp"),
    *("pp2 1f1b:4", "pp2 zb-v:4", "dp2 tp2 zero3", "pp2 tp2 gpipe:3", "pp2 dp2 zero3 1f1b:3"),
]


def engine_state(world: World, shape: str, plan: str) -> State:
    task = gpt_task(shape)
    engine = build(world, task, Case(plan, **ADAMW))
    for step in range(2):
        engine.step(share(task.batch(step), engine.data_rank, engine.data_ranks))
    state = sw.full_state_dict(engine)
    engine.step(share(task.batch(2), engine.data_rank, engine.data_ranks))
    return state


@pytest.mark.parametrize("plan", PLANS)
def test_a_plain_model_takes_the_full_state_of_an_engine(plan: str):
    """Under data, tensor, sequence and pipeline parallelism, with a tied embedding."""
    found = run_threads(Plan.parse(plan).size, engine_state, "tied", f"{plan} fp64")
    expected = oracle(gpt_task("tied"), Case(plan, steps=2, **ADAMW)).weights
    assert found[1:] == [{}] * (len(found) - 1)
    plain = made("tied").double()
    assert list(found[0]) == list(plain.state_dict())
    plain.load_state_dict(found[0])
    for name, p in plain.named_parameters():
        assert difference(p.detach(), expected[name]) <= 1e-10, name


def test_weights_trained_in_16_bits_are_given_in_32():
    """As precise as they are kept: rounded to 16 bits they would not go on as before."""
    state = run_threads(2, engine_state, "untied", "dp2 zero3 bf16")[0]
    assert all(v.dtype == torch.float32 for v in state.values() if v.is_floating_point())
    assert any((v != v.bfloat16()).any() for v in state.values())


def messages(world: World) -> list[int]:
    """The sizes of what rank 0 receives."""
    sizes: list[int] = []
    taken = full.receive

    def receive(out: Tensor, axis: Any, source: int) -> Tensor:
        sizes.append(out.numel())
        return taken(out, axis, source)

    module = sw.FSDP(model(), units=1, world=world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "receive", receive)
        full.full_state_dict(module)
    return sizes


def test_one_piece_of_a_tensor_is_received_at_a_time():
    """The largest matrix has 36 elements of 8 bytes, of which the other rank holds a half or so."""
    sizes = run_gloo(2, messages)[0]
    boxes = sizes[2:]  # after the length of the list, and the list
    assert len(boxes) > 5
    assert max(boxes) <= 36 * 8


@pytest.mark.parametrize("wrap_first", [True, False])
def test_parts_that_are_compiled_in_their_place_keep_their_keys(wrap_first: bool):
    """`torch.compile(part)` puts a level into names, before the wrapping and after it."""
    module = Buffered()
    expected = list(module.state_dict())
    if wrap_first:
        sw.FSDP(module, world=alone())
    compiled: Any = torch.compile(module.blocks[0], backend="eager")
    module.blocks[0] = compiled
    if not wrap_first:
        sw.FSDP(module, world=alone())
    assert list(sw.full_state_dict(module)) == expected


def test_a_module_that_is_not_wrapped_is_refused():
    """It has a state_dict of its own."""
    with pytest.raises(InputError, match=r"Write instead: module.state_dict\(\)"):
        sw.full_state_dict(nn.Linear(2, 2))
    with pytest.raises(InputError):
        sw.full_state_dict(3)  # type: ignore[arg-type]
    assert list(sw.full_state_dict(sw.DDP(nn.Linear(2, 2), alone()))) == ["weight", "bias"]
