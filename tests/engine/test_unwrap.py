"""Whole weights out of and into a model that ranks hold in parts: unwrap, copies, full states."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from shardwise.comm.transport import Lease
from shardwise.comm.world import World
from tests.engine.cases import refusal, settled, squares
from tests.engine.loops import rows, steps, wrap
from tests.engine.test_wrapped import data_of
from tests.engine.zoo import Buffered, make
from tests.pool import run_gloo, run_threads

WAYS = ["FULL_SHARD", "DDP", "SHARD_GRAD_OP", "HYBRID_SHARD"]
State = dict[str, Tensor]


def train(model: nn.Module, rank: int, first: int = 0, count: int = 2) -> None:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps(optim, count):
        squares(model, rows(first + step, rank)).backward()


def buffered() -> nn.Module:
    return settled(Buffered()).double()


# --- unwrap ---------------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    tables += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    of_modules = sum(len(getattr(m, name)) for m in model.modules() for name in tables)
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def given_back(world: World, how: str) -> dict[str, Any]:
    model = make("stack").double()
    model.__class__ = type("Writes", (type(model),), {"generate": None})  # as in transformers
    names = [(name, id(p), p.shape) for name, p in model.named_parameters()]
    wrap(how, model, world)
    train(model, world.rank)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    model(rows(2, world.rank)).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert sw.unwrap(model) is model
    after = [p.grad for p in model.parameters()]
    own = [p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()]
    facts = {
        "names": names == [(name, id(p), p.shape) for name, p in model.named_parameters()],
        "values": all(torch.equal(whole[name], p) for name, p in model.named_parameters()),
        "memory": all(own),
        "hooks": hooks_on(model) == 0,
        "attributes": "_is_fsdp_managed_module" not in vars(model),
        "grads": after == [None] * len(after)
        if how != "DDP"
        else all(torch.equal(a, b) for a, b in zip(after, grads, strict=True) if a is not None),
    }
    model.zero_grad()
    alone = copy.deepcopy(model)
    train(alone, world.rank, 2, 1)
    train(model, world.rank, 2, 1)
    return facts | {"trains": same(model, alone)}


@pytest.mark.parametrize("how", WAYS)
def test_unwrap_gives_the_module_back_as_it_was(how: str):
    """Names, objects, shapes and whole values; no hook is left; one process trains it."""
    for facts in run_threads(4 if how == "HYBRID_SHARD" else 2, given_back, how):
        assert all(facts.values()), facts


def pipe_given_back(world: World) -> dict[str, bool]:
    model = buffered()
    plain = copy.deepcopy(model)
    own = list(model.named_parameters())
    sw.Pipe(model, 1, world=world)
    held = {id(p) for p in model.parameters()}
    train(model, 0)
    whole = sw.full_state_dict(model)
    assert sw.unwrap(model) is model
    found = model.state_dict()
    places = "shardwise.techniques.pipeline.trace.placeholders"
    facts = {
        "names": list(found) == list(plain.state_dict()),
        "values": all(torch.equal(found[key], value) for key, value in whole.items()),
        "objects": {id(p) for _, p in own} & {id(p) for p in model.parameters()} >= held,
        "tie": model.get_parameter("leave.weight") is model.get_parameter("enter.weight"),
        "tied values": whole.get("leave.weight") is whole.get("enter.weight"),
        "plain": all(type(m).__module__ != places for m in model.modules()),
    }
    train(pickle.loads(pickle.dumps(model)), 0, 0, 1)  # noqa: S301  our own
    again = copy.deepcopy(model)
    out = sw.Pipe(again, 2, world=world).eval()(rows(5, 0))
    return facts | {"again": torch.allclose(out, model.eval()(rows(5, 0)), rtol=1e-12)}


def test_unwrap_gives_a_pipe_s_module_back():
    """Whole and equal on all ranks, what is tied tied; a rank's own parameters stay objects."""
    for facts in run_threads(2, pipe_given_back):
        assert all(facts.values()), facts


def at_the_end(world: World) -> list[torch.Size]:
    """The shapes of the parameters when the module's groups are given back."""
    model, shapes = wrap("FULL_SHARD", make("stack").double(), world), list[torch.Size]()
    (lease,) = (one for one in data_of(model).handles if isinstance(one, Lease))
    lease.remove = lambda: shapes.extend(p.shape for p in model.parameters())
    sw.unwrap(model)
    return shapes


def test_groups_are_given_back_after_the_last_message():
    """No rank waits for a message on a group that another one has left."""
    shapes = [p.shape for p in make("stack").parameters()]
    assert run_threads(2, at_the_end) == [shapes] * 2


# --- copies ---------------------------------------------------------------------------------------


class Large(nn.Module):
    """Large enough for its layers to be taken over, with a norm that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 160)
        self.net = nn.Sequential(nn.Linear(160, 512), nn.BatchNorm1d(512), nn.Linear(512, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids))


def by_torch(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": by_torch,
    # what an argument of torch.multiprocessing's Process goes through
    "multiprocessing": lambda model: pickle.loads(ForkingPickler.dumps(model)),  # noqa: S301
}


def copied(world: World, way: str) -> dict[str, bool]:
    torch.manual_seed(0)
    model, ids = sw.DDP(Large(), world), torch.arange(8) + 8 * world.rank
    model(ids).square().mean().backward()
    twin = COPIES[way](model)
    facts = {"values": same(model, twin)}
    sent = world_bytes(model)
    twin(ids).sum().backward()  # on this rank alone: nothing waits for others
    facts["sends nothing"] = world_bytes(model) == sent
    facts["no hooks"] = hooks_on(twin) == 0
    wrap("DDP", twin, world)
    for each in (model, twin):
        each.zero_grad()
        each(ids).square().mean().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    found = [(a.grad, b.grad) for a, b in pairs]
    facts["wraps"] = all(a is not None and b is not None and torch.equal(a, b) for a, b in found)
    return facts


def world_bytes(model: nn.Module) -> int:
    ledger = data_of(model).consensus.axes[1].ledger
    return sum(tally.sent_bytes for tally in ledger.lines.values())


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_replicated_module_is_a_plain_module(way: str):
    """The values of this rank, no process groups, no hooks once it is used; it can be wrapped."""
    for facts in run_gloo(2, copied, way):
        assert all(facts.values()), facts


def of_engine(world: World) -> dict[str, bool]:
    engine = sw.parallelize(make("stack").double(), "dp2 fp64", world, loss=squares)
    engine.step(rows(0, world.rank))
    twin = copy.deepcopy(engine.model)
    before = engine.sent()
    facts = {"values": same(engine.model, twin)}
    twin(rows(1, world.rank)).sum().backward()  # on this rank alone
    facts["plain"] = hooks_on(twin) == 0 and engine.sent() == before
    engine.step(rows(1, world.rank))
    return facts | {"apart": not same(engine.model, twin)}


def test_a_copy_of_an_engines_model_is_a_plain_module():
    """Where each rank holds all of it: its values of now, and the engine goes on by itself."""
    for facts in run_threads(2, of_engine):
        assert all(facts.values()), facts


def laid_out(world: World, how: str) -> nn.Module:
    if how in (*WAYS, "Pipe"):
        return wrap(how, make("stack"), world)
    model, table = make("stack"), None
    if how == "tp2":
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        table = {"0": "colwise", "2": "rowwise"}
    return sw.parallelize(model, how, world, loss=squares, table=table).model


def refused(world: World, how: str) -> list[str]:
    acts = (
        (sw.unwrap,) if how in UNWRAPPED else (copy.deepcopy, pickle.dumps, by_torch, AveragedModel)
    )
    return [refusal(partial(act, laid_out(world, how))) for act in acts]


IN_PART = ["FULL_SHARD", "Pipe", "tp2", "dp2 zero1", "pp2 1f1b:2"]
UNWRAPPED = ["dp2 ddp", "dp2 zero3"]


@pytest.mark.cases(7)
@pytest.mark.parametrize("how", [*IN_PART, *UNWRAPPED])
def test_a_copy_of_a_part_and_unwrapping_an_engine_are_refused(how: str):
    """By one paragraph that says how whole values are had, and averages."""
    said = "sw.full_state_dict"
    for texts in run_threads(2, refused, how):
        for told in texts:
            assert said in told
            assert ("passed to sw.DDP, sw.FSDP or sw.Pipe" in told) == (how in UNWRAPPED)
            assert how in UNWRAPPED or "sw.unwrap(module)" in told
            assert how != "FULL_SHARD" or "an average of weights the loop in docs/how-to/" in told
