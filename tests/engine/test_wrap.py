import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan.plan import Plan
from shardwise.techniques.data.apply import driver_of
from shardwise.techniques.data.unit_hooks import Data
from shardwise.wrap.wrap import STRATEGIES
from tests.engine import loops
from tests.engine.cases import Case, Task, build, difference, refusal, share, text
from tests.engine.loops import LOOPS, adam, on_ranks, rows, wrap
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

WAYS = ["DDP", *STRATEGIES]
SHARDING = [how for how in STRATEGIES if how != "NO_SHARD"]  # which is DDP


def ranks_of(how: str) -> int:
    return 4 if "HYBRID" in how else 2


def assert_equal(found: list[Any], expected: tuple[dict[str, Tensor], list[float]]) -> None:
    """Every rank has the plain loop's weights and noted what it noted."""
    weights, seen = expected
    for own, noted in found:
        assert noted == pytest.approx(seen, rel=1e-10)
        assert list(own) == list(weights)
        for name, weight in own.items():
            assert difference(weight, weights[name]) <= 1e-10, name


@pytest.mark.cases(3)
@pytest.mark.parametrize("how", ["DDP", *SHARDING, "FULL_SHARD offload"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_plain_loop_does_what_it_does_on_a_plain_module(loop, how):
    """The user's own loop and optimizer: weights as if all ranks' losses had been averaged."""
    ranks = ranks_of(how)
    found = run_threads(ranks, on_ranks, how, LOOPS[loop], "stack")
    assert_equal(found, loops.alone(ranks, LOOPS[loop], "stack"))


@pytest.mark.crossed
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("loop", ["as_written", "unsynced", "clipping"])
def test_plain_loops_on_processes(loop, how):
    """The same on gloo."""
    ranks = ranks_of(how)
    found = run_gloo(ranks, on_ranks, how, LOOPS[loop], "twice")
    assert_equal(found, loops.alone(ranks, LOOPS[loop], "twice"))


@pytest.mark.parametrize("model", ["part of each frozen", "checkpoint around", "returns a dict"])
@pytest.mark.parametrize("how", ["DDP", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_plain_loops_of_other_models(how, model):
    """Frozen parameters, recomputation; outputs that are no tensors have their own loss."""

    def loop(side: loops.Side) -> None:
        optim = adam(side.model)
        for step in range(3):
            for rank in side.shares:
                out = side.model(rows(step, rank))
                out = out["value"] if isinstance(out, dict) else out
                (out.square().mean() / (1 if side.wrapped else side.ranks)).backward()
            optim.step()
            optim.zero_grad()

    assert_equal(run_threads(2, on_ranks, how, loop, model), loops.alone(2, loop, model))


class Counting(nn.Module):
    """Notes the buffers with which each forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.seen: list[float] = []
        self.count: Tensor = nn.Buffer(torch.zeros(()))
        self.mask = nn.Buffer(torch.zeros(3, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.count.item() + 100 * int(self.mask.sum()))
        return self.layer(x)


def counted(world: World, how: str) -> tuple[list[float], int]:
    """Buffers that each rank changes before each forward pass of two steps of two microbatches."""
    model, data = Counting(), rows(0, world.rank).float()
    if how == "DDP, each its own":
        sw.DDP(model, world, broadcast_buffers=False)
    else:
        wrap(how, model, world)
    ledger = loops_data(model).consensus.axes[how[:3] == "DDP"].ledger
    before = ledger.copy()
    for step in range(4):
        if world.rank == 0:
            model.count = model.count + 1
            model.mask.data[:1] = step % 2 == 1
        else:
            model.count.fill_(-7.0)
        with nullcontext() if step % 2 else sw.no_sync(model):
            model(data).sum().backward()
    model.eval()(data)  # the ranks do not meet
    sent = sum(t.sent_bytes for k, t in ledger.since(before).items() if k[1] == "broadcast")
    return model.seen, sent


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD"])
def test_every_step_begins_with_the_buffers_of_rank_0(how):
    """In one message; between the microbatches each rank keeps what it has counted, as in torch."""
    one, two = run_threads(2, counted, how)
    assert one == ([1.0, 102.0, 3.0, 104.0, 104.0], 2 * 7)
    assert two == ([1.0, -7.0, 3.0, -7.0, -7.0], 0)


def test_without_broadcast_buffers_each_rank_keeps_its_own():
    """As under DDP(broadcast_buffers=False): rank 0's at the start only."""
    one, two = run_threads(2, counted, "DDP, each its own")
    assert one == ([1.0, 102.0, 3.0, 104.0, 104.0], 0)
    assert two == ([-7.0] * 5, 0)


def kept(world: World, how: str) -> list[bool]:
    """Class, identity, names and keys through wrapping and training; shapes in forward."""
    model = make("twice").double()
    before = [(n, id(p)) for n, p in model.named_parameters()], list(model.state_dict())
    kind, shapes = type(model), {n: v.shape for n, v in model.state_dict().items()}
    out = wrap(how, model, world)
    inside: list[bool] = []
    hook = model.get_submodule("out").register_forward_pre_hook(
        lambda module, _: inside.append(module.weight.shape == shapes["out.weight"])
    )
    out(rows(0, world.rank)).sum().backward()
    hook.remove()
    after = [(n, id(p)) for n, p in out.named_parameters()], list(out.state_dict())
    state = {n: v.shape for n, v in out.state_dict().items()}
    return [out is model, type(out) is kind, before == after, state == shapes, inside == [True]]


@pytest.mark.parametrize("how", WAYS)
def test_class_names_identities_and_keys_are_kept(how):
    """Inside forward parameters have their own shape; state_dict is whole, under the old keys."""
    for found in run_threads(ranks_of(how), kept, how):
        assert found == [True] * 5


def loaded(world: World, how: str) -> list[bool]:
    source = make("stack").double().state_dict()
    model = make("stack").double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model = wrap(how, model, world)
    optim = adam(model)
    model(rows(0, 0)).sum().backward()
    optim.step()
    result = model.load_state_dict(source)
    good = [not result.missing_keys and not result.unexpected_keys]
    good += [torch.equal(v, source[n]) for n, v in model.state_dict().items()]
    plain = make("stack").double()
    good.append(torch.allclose(model(rows(1, 1)), plain(rows(1, 1)), rtol=1e-12))
    held = model.state_dict()
    optim.step()
    if how not in ("DDP", "NO_SHARD"):  # a copy; unsharded it is views, as of any module
        good.append(all(torch.equal(v, source[n]) for n, v in held.items()))
    return good


@pytest.mark.parametrize("how", WAYS)
def test_load_state_dict_takes_whole_tensors(how):
    """What a single process saved is loaded, used in forward, and given back unchanged."""
    for good in run_threads(ranks_of(how), loaded, how):
        assert all(good)


def different_starts(world: World, how: str) -> dict[str, Tensor]:
    model = make("stack").double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(world.rank)
    return dict(wrap(how, model, world).state_dict())


@pytest.mark.parametrize("how", WAYS)
def test_every_rank_begins_with_the_weights_of_rank_0(how):
    """Whatever the others had."""
    expected = make("stack").double().state_dict()
    for found in run_gloo(ranks_of(how), different_starts, how):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_torchs_own_enum_is_understood():
    """ShardingStrategy.SHARD_GRAD_OP means what the name means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import ShardingStrategy
    for strategy in ShardingStrategy:
        assert strategy.name in STRATEGIES
    model = sw.FSDP(make("stack"), ShardingStrategy.SHARD_GRAD_OP, world=alone())
    assert isinstance(model, nn.Module)


def volumes(world: World, how: str) -> int:
    """Bytes a rank sends from one training forward up to the next, consensus included."""
    model = make("stack").double()
    model = wrap(how, model, world)
    data = loops_data(model)
    ledger = (
        data.consensus.axes[0].ledger
        if data.consensus.axes[0].size > 1
        else data.consensus.axes[1].ledger
    )
    before = ledger.copy()
    model(rows(0, 0)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    model(rows(1, 0))
    return sum(t.sent_bytes for t in ledger.since(before).values())


def loops_data(model: nn.Module) -> Data:
    found = driver_of(model)
    assert found is not None
    return found


def test_sharding_the_gradient_only_sends_less_than_sharding_all():
    """NO_SHARD and DDP send 2 N, SHARD_GRAD_OP 2 N, FULL_SHARD more: it gathers twice."""
    sent = {how: run_threads(2, volumes, how)[0] for how in WAYS if "HYBRID" not in how}
    assert sent["DDP"] == sent["NO_SHARD"] <= sent["SHARD_GRAD_OP"] < sent["FULL_SHARD"]


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_world_of_one_is_the_plain_module_and_free(how, monkeypatch: pytest.MonkeyPatch):
    """Without a world there is one rank: shapes stay, nothing is sent, results are the same."""
    calls: list[str] = []
    monkeypatch.setattr("shardwise.comm.ledger.Ledger.begin", lambda *args: calls.append(args[2]))
    model = make("stack").double()
    model = sw.DDP(model) if how == "DDP" else sw.FSDP(model, how)
    shapes = [p.shape for p in model.parameters()]
    assert shapes == [p.shape for p in make("stack").parameters()]
    side = loops.Side(model, [0], 1, True)
    loops.clipping(side)
    expected, seen = loops.alone(1, loops.clipping, "stack")
    assert side.seen == pytest.approx(seen, rel=1e-12)
    assert all(difference(v, expected[n]) <= 1e-12 for n, v in model.state_dict().items())
    assert calls == []


def buckets(world: World, units: Any) -> int:
    model = sw.FSDP(make("stack"), "NO_SHARD", units=units, world=world)
    data = driver_of(model)
    assert data is not None
    return len(data.units.order)


def test_units_are_the_buckets_of_a_strategy_that_shards_nothing():
    """The wrap policy is followed, although no unit is gathered."""
    few, several = (run_threads(2, buckets, units)[0] for units in ("auto", 1))
    assert few < several


def half_norm(world: World) -> float:
    model = sw.FSDP(make("stack").bfloat16(), world=world)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    squares = 0.0
    for p in model.parameters():
        assert p.grad is not None
        squares += float(p.grad.double().square().sum())
    norm = float(sw.clip_grad_norm(model, 1e9))
    return norm - squares**0.5


def test_the_norm_of_half_precision_gradients_is_taken_in_fp32():
    """A norm rounded to bf16 would be off by up to 1 in 256."""
    assert abs(run_threads(1, half_norm)[0]) < 1e-3


def dropped(world: World, how: str) -> list[bool]:
    """Train and let go of it: whether the weights are alive before and after."""
    if how in WAYS:
        held: Any = wrap(how, make("stack").double(), world)
        held(rows(0, world.rank)).square().mean().backward()
    else:
        held = build(world, Task(), Case(how))
        held.step(share(text(0), held.data_rank, held.data_ranks))
    weight = weakref.ref(next(iter(held.parameters() if how in WAYS else held.model.parameters())))
    alive = [weight() is not None]
    world.barrier()
    del held
    gc.collect()
    world.barrier()  # the last of all ranks has collected
    gc.collect()
    return [*alive, weight() is not None]


@pytest.mark.parametrize("how", [*WAYS, "dp2 zero2", "tp2 sp", "pp2 dp2 zero3 zb-h1:2"])
def test_what_nobody_holds_is_freed(how: str):
    """Hooks on parameters, which the collector does not see, keep nobody alive."""
    ranks = ranks_of(how) if how in WAYS else Plan.parse(how).size
    assert run_threads(ranks, dropped, how) == [[True, False]] * ranks


def scaled(world: World, how: str, act: Callable[[nn.Module], object]) -> None:
    """A loop whose program changes the gradients by `act` before each step."""
    module = wrap(how, make("stack").double(), world)
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        module(rows(step, world.rank)).square().sum().backward()
        act(module)
        optim.step()
        optim.zero_grad()
    module(rows(4, world.rank)).sum().backward()


def clip_by_torch(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def clip_by_ours(module: nn.Module) -> None:
    sw.clip_grad_norm(module, 0.1)


def clip_values(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)


def unscale(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = p.grad if p.grad is None else p.grad.mul_(0.125)


def one_layer(module: nn.Module) -> None:
    for p in list(module.parameters())[:1]:
        p.grad = p.grad if p.grad is None else p.grad.mul_(7)


@pytest.mark.parametrize("how", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_clipping_by_torch_is_refused(how: str):
    """Each rank has another norm: the next backward pass says so, on all ranks."""
    for told in run_threads(2, refused_scaling, how):
        assert "torch.nn.utils.clip_grad_norm_" in told and "sw.clip_grad_norm(module" in told


def refused_scaling(world: World, how: str) -> str:
    return refusal(lambda: scaled(world, how, clip_by_torch))


@pytest.mark.parametrize("how", ["FULL_SHARD", "DDP"])
@pytest.mark.parametrize("act", [clip_by_ours, clip_values, unscale, one_layer])
def test_what_scales_all_ranks_alike_is_not(how: str, act: Callable[[nn.Module], object]):
    """Nor what changes elements one by one, nor a part of the parameters."""
    run_threads(2, scaled, how, act)
    if how == "DDP":
        run_threads(2, scaled, how, clip_by_torch)
