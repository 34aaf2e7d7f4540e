"""Wrapped modules: what they keep, send and free; hooks of programs; what they refuse."""

import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan.plan import Plan
from shardwise.models import hf as hf_models
from shardwise.techniques.data.apply import driver_of, flats_of
from shardwise.techniques.data.unit_hooks import Data
from shardwise.wrap.wrap import STRATEGIES
from tests.engine import loops
from tests.engine.cases import Case, Task, build, difference, share, squares, text
from tests.engine.loops import adam, rows, steps, wrap
from tests.engine.zoo import dims, make
from tests.pool import run_gloo, run_threads

WAYS = ["DDP", *STRATEGIES]
State = dict[str, Tensor]


def ranks_of(how: str) -> int:
    if how.partition(" ")[0] not in WAYS:
        return Plan.parse(how).size
    return 4 if "HYBRID" in how else 2


def data_of(model: nn.Module) -> Data:
    found = driver_of(model)
    assert found is not None
    return found


# --- what is kept, sent and freed -----------------------------------------------------------------


def kept(world: World, how: str) -> dict[str, bool]:
    """Wrapping of weights that differ by rank, a step, and whole weights that are loaded."""
    model = make("twice").double()
    source = model.state_dict()
    start = {name: value.clone() for name, value in source.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(world.rank)
    before = [(n, id(p)) for n, p in model.named_parameters()], list(source)
    kind, shapes = type(model), {n: v.shape for n, v in source.items()}
    out = wrap(how, model, world)
    facts = {"weights of rank 0": same(out.state_dict(), start)}
    inside: list[bool] = []
    hook = model.get_submodule("out").register_forward_pre_hook(
        lambda module, _: inside.append(module.weight.shape == shapes["out.weight"])
    )
    out(rows(0, world.rank)).sum().backward()
    hook.remove()
    flats = flats_of(data_of(out).units.order)
    held = [x.detach() for p in out.parameters() for x in (p, p.grad) if x is not None]
    place = "host" if "offload" in how else "device"
    facts["place"] = {flats[0].tiers.of(x) for x in held} == {place}
    after = [(n, id(p)) for n, p in out.named_parameters()], list(out.state_dict())
    facts["class"] = out is model and type(out) is kind
    facts["names"], facts["shapes inside"] = before == after, inside == [True]
    facts["shapes"] = {n: v.shape for n, v in out.state_dict().items()} == shapes
    optim = adam(out)
    optim.step()
    result = out.load_state_dict(start)
    plain = make("twice").double()
    facts["used"] = torch.allclose(out(rows(1, 1)), plain(rows(1, 1)), rtol=1e-12)
    state = out.state_dict()
    facts["loaded"] = same(state, start) and not result.missing_keys and not result.unexpected_keys
    optim.step()
    # a copy; unsharded it is views, as of any module
    facts["a copy"] = how in ("DDP", "NO_SHARD") or same(state, start)
    return facts


def same(state: State, other: State) -> bool:
    return all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "how", ["FULL_SHARD offload", "DDP", *(h for h in STRATEGIES if h != "FULL_SHARD")]
)
def test_class_names_identities_and_whole_values_are_kept(how: str):
    """state_dict is whole, under the old keys; what a single process saved is loaded. Offloaded
    shards and gradients rest in host memory.
    """
    for facts in run_threads(ranks_of(how), kept, how):
        assert all(facts.values()), facts


def test_torchs_own_enum_is_understood():
    """ShardingStrategy.SHARD_GRAD_OP means what the name means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import ShardingStrategy
    assert {strategy.name for strategy in ShardingStrategy} <= {*STRATEGIES}
    model = sw.FSDP(make("stack"), ShardingStrategy.SHARD_GRAD_OP, world=alone())
    assert isinstance(model, nn.Module)


class Counting(nn.Module):
    """Notes the buffers with which each forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.seen: list[float] = []
        self.count: Tensor = nn.Buffer(torch.zeros(()))
        self.mask = nn.Buffer(torch.zeros(3, dtype=torch.bool), persistent=False)
        self.one = nn.Buffer(torch.ones(1, dtype=torch.int8).expand(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.count.item() + 100 * int(self.mask.sum()))
        return self.layer(x)


def counted(world: World, how: str) -> tuple[list[float], int]:
    """Buffers that each rank changes before each forward pass of two steps of two microbatches."""
    model, data = Counting(), rows(0, world.rank).float()
    model.mask[2] = world.rank == 1  # before the wrapping
    if how == "DDP, each its own":
        sw.DDP(model, world, broadcast_buffers=False)
    else:
        wrap(how, model, world)
    ledger = data_of(model).consensus.axes[how[:3] == "DDP"].ledger
    before = ledger.lines
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


@pytest.mark.cases(3)
@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "DDP, each its own"])
def test_every_step_begins_with_the_buffers_of_rank_0(how: str):
    """In one message; between the microbatches each rank keeps what it has counted, as in torch.
    With broadcast_buffers=False rank 0's are everyone's at the start only.
    """
    one, two = run_threads(2, counted, how)
    own = how == "DDP, each its own"
    assert one == ([1.0, 102.0, 3.0, 104.0, 104.0], 0 if own else 2 * 12)
    assert two == ([-7.0] * 5 if own else [1.0, -7.0, 3.0, -7.0, -7.0], 0)


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "NO_SHARD"])
def test_a_world_of_one_is_the_plain_module_and_free(how: str, monkeypatch: pytest.MonkeyPatch):
    """Without a world there is one rank: shapes stay, nothing is sent, results are the same."""
    calls: list[str] = []
    monkeypatch.setattr("shardwise.comm.ledger.Ledger.begin", lambda *args: calls.append(args[2]))
    model = make("stack").double()
    model = sw.DDP(model) if how == "DDP" else sw.FSDP(model, how)
    assert [p.shape for p in model.parameters()] == [p.shape for p in make("stack").parameters()]
    side = loops.Side(model, [0], 1, True)
    loops.clipping(side)
    plain = loops.Side(make("stack").double(), [0], 1, False)
    loops.clipping(plain)
    expected = plain.model.state_dict()
    assert side.seen == pytest.approx(plain.seen, rel=1e-12)
    assert all(difference(v, expected[n]) <= 1e-12 for n, v in model.state_dict().items())
    assert calls == []


def buckets(world: World, units: Any) -> int:
    return len(data_of(sw.FSDP(make("stack"), "NO_SHARD", units=units, world=world)).units.order)


def test_units_are_the_buckets_of_a_strategy_that_shards_nothing():
    """The wrap policy is followed, although no unit is gathered."""
    few, several = (run_threads(2, buckets, units)[0] for units in ("auto", 1))
    assert few < several


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


@pytest.mark.cases(4)
@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "tp2 sp", "pp2 dp2 zero3 zb-h1:2"])
def test_what_nobody_holds_is_freed(how: str):
    """Hooks on parameters, which the collector does not see, keep nobody alive."""
    assert run_threads(ranks_of(how), dropped, how) == [[True, False]] * ranks_of(how)


def generated(world: World, plan: str) -> tuple[Tensor, bool]:
    """This rank's own text, which ends early on one rank, and whether the model knows it is cut."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model: Any = hf.LlamaForCausalLM(hf_models.small_config("llama"))
    if world.size > 1:
        fsdp = plan == "FSDP"
        model = sw.FSDP(model, world=world) if fsdp else sw.parallelize(model, plan, world).model
    texts = []
    for rank in [world.rank] if world.size > 1 else [0, 1]:
        ids, ends = torch.tensor([[5, 7 + rank]]), {"max_new_tokens": 3 + 4 * rank}
        out = model.eval().generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **ends)
        texts.append(F.pad(out[0], (0, 9 - out.shape[1])))
    return torch.stack(texts), "_is_fsdp_managed_module" in vars(model)


@pytest.mark.parametrize("plan", ["FSDP", "dp2 zero3"])
def test_texts_of_ranks_end_at_different_lengths(plan: str):
    """`generate()` of transformers sees that ranks must run equally many passes."""
    expected, _ = generated(alone(), plan)
    for rank, (row, together) in enumerate(run_gloo(2, generated, plan)):
        assert torch.equal(row[0], expected[rank])
        assert together


# --- hooks, and gradients of gradients ------------------------------------------------------------

Seen = list[list[float]]


def hang(model: nn.Module, seen: Seen) -> None:
    """Hooks that look at gradients, scale them, and clip them after accumulation."""
    for number, p in enumerate(model.parameters()):
        if number % 2:
            p.register_hook(lambda grad: grad * 0.5)
        p.register_post_accumulate_grad_hook(partial(look_and_clip, seen))


def look_and_clip(seen: Seen, p: Tensor) -> None:
    assert p.grad is not None
    seen.append(p.grad.flatten().tolist())
    p.grad.clamp_(-1e-2, 1e-2)


def hooked(world: World, how: str, passes: int, early: bool) -> tuple[State, Seen]:
    """Three steps of some passes, all but the last of which are not synchronised."""
    model, seen = make("stack").double(), Seen()
    if early:
        hang(model, seen)
    model = wrap(how, model, world)
    if not early:
        hang(model, seen)
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in steps(optim):
        for micro in range(passes):
            with nullcontext() if micro == passes - 1 else sw.no_sync(model):
                squares(model, rows(passes * step + micro, world.rank)).backward()
    return model.state_dict(), seen


def as_torch_does(passes: int) -> list[tuple[State, Seen]]:
    """Two copies whose gradients are averaged after their own hooks."""
    copies = [make("stack").double() for _ in range(2)]
    seen: list[Seen] = [Seen(), Seen()]
    for copy, own in zip(copies, seen, strict=True):
        hang(copy, own)
    for step in range(3):
        for rank, copy in enumerate(copies):
            for micro in range(passes):
                squares(copy, rows(passes * step + micro, rank)).backward()
        for ps in zip(*(copy.parameters() for copy in copies), strict=True):
            mean = torch.stack([p.grad for p in ps if p.grad is not None]).mean(0)
            for p in ps:
                p.data -= 0.5 * mean
                p.grad = None
    return [(copy.state_dict(), own) for copy, own in zip(copies, seen, strict=True)]


@pytest.mark.cases(4)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("how", "passes"), [("DDP", 2), ("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1)])
def test_hooks_see_and_change_the_gradients_of_their_rank(how: str, passes: int, early: bool):
    """Of all passes since the gradients were dropped; what they change is averaged."""
    found = run_threads(2, hooked, how, passes, early)
    for (state, seen), (right, ours) in zip(found, as_torch_does(passes), strict=True):
        assert [len(grad) for grad in sorted(seen)] == [len(grad) for grad in sorted(ours)]
        for own, wanted in zip(sorted(seen), sorted(ours), strict=True):
            assert own == pytest.approx(wanted, rel=1e-8, abs=1e-12)
        for name, value in right.items():
            assert difference(state[name], value) <= 1e-10, name


def accumulated(world: World) -> Tensor:
    """Two passes that are differentiated in turn, added up on the parameter."""
    layer = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    sw.DDP(layer, world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in (1.0, 2.0):
            x = torch.full((1, 2), k + world.rank, dtype=torch.float64)
            layer(x).square().sum().backward(create_graph=True)
    assert layer.weight.grad is not None
    grad = layer.weight.grad
    (hessian,) = torch.autograd.grad(grad.sum(), layer.weight)
    return torch.cat([grad.detach(), hessian])


def test_gradients_of_several_passes_keep_their_graphs():
    """The value is the mean over the ranks, the derivative that of this rank's own passes."""
    # of (k w.1)^2, w = (1, 1): 4 k^2 each; its sum's derivative: 4 k^2 each
    for rank, found in enumerate(run_threads(2, accumulated)):
        own = [(1.0 + rank) ** 2, (2.0 + rank) ** 2]
        assert found[0].tolist() == pytest.approx([4 * (1 + 4 + 4 + 9) / 2] * 2)
        assert found[1].tolist() == pytest.approx([4 * sum(own)] * 2)


def apply_in_backward(optimizer: Any, model: nn.Module, **options: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the package is imported
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, model.parameters(), options)


def in_backward(world: World, how: str) -> State:
    model, optim = make("sequential").double(), None
    if how == "before":
        apply_in_backward(torch.optim.Adam, model, lr=0.05)
    sw.DDP(model, world)
    if how == "after":
        apply_in_backward(torch.optim.Adam, model, lr=0.05)
    if how == "a step":
        optim = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(4):
        with nullcontext() if step % 2 else sw.no_sync(model):
            squares(model, rows(step, world.rank)).backward()
        if optim is not None and step % 2:
            optim.step()
            optim.zero_grad()
        assert step % 2 == 0 or all(p.grad is None for p in model.parameters())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_optimizers_in_backward_do_what_a_step_after_it_does():
    """Made before or after the wrapping: same weights, no gradient left, no update in no_sync."""
    expected = run_threads(2, in_backward, "a step")[0]
    for how in ("before", "after"):
        for found in run_threads(2, in_backward, how):
            assert same(found, expected)


def with_first_states(world: World) -> dict[str, Tensor]:
    """The weights after a step of Adagrad, whose states are made with it, in a plain loop."""
    model = sw.FSDP(dims(), world=world)
    optim = torch.optim.Adagrad(model.parameters(), lr=0.1)
    both = torch.cat([rows(0, rank) for rank in range(2)])
    squares(model, both.chunk(world.size)[world.rank]).backward()
    optim.step()
    return model.state_dict()


def test_a_step_count_is_not_taken_for_a_state_of_a_parameter_without_dims():
    """Both have the same shape, and the rank without the parameter's element steps too."""
    ours, (expected,) = run_threads(2, with_first_states)[1], run_threads(1, with_first_states)
    assert all(difference(ours[name], expected[name]) < 1e-12 for name in expected)
