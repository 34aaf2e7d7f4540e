"""`sw.save` and `sw.load` of a module in a loop of the program's own, with its optimizer."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.contents import describe
from shardwise.checkpoint.export import export
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.own import Own
from tests.engine.loops import rows
from tests.pool import run_gloo

KINDS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1, amsgrad=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "Own": Own,
}


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


def build() -> nn.Sequential:
    torch.manual_seed(0)
    late = nn.Linear(7, 7)  # has no gradient in the first steps
    return nn.Sequential(Counted(), nn.Tanh(), late, nn.Linear(7, 5), nn.Linear(5, 3)).double()


class Sum(nn.Module):
    """A chain whose third layer is used from step 3 on."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = build()

    def forward(self, x: Tensor, late: int) -> Tensor:
        first, act, branch, second, last = self.chain
        h = act(first(x))
        return last(second(h + branch(h) if late else h))


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    """Two groups with rates of their own."""
    named = list(module.named_parameters())
    weights = [p for n, p in named if n.endswith("weight")]
    biases = [p for n, p in named if not n.endswith("weight")]
    return KINDS[kind]([{"params": weights}, {"params": biases, "lr": 0.003}], lr=0.02)


def wrap(how: str, module: nn.Module, world: World) -> nn.Module:
    if how == "Pipe":
        return sw.Pipe(module, chunks=1, world=world)
    if how == "DDP":
        return sw.DDP(module, world)
    return sw.FSDP(module, how, units=1, world=world)


def part(
    world: World, folder: str, how: str, kind: str, steps: range, later: bool
) -> dict[str, Any]:
    """Steps of a loop, from a checkpoint if `later`, to a checkpoint if not."""
    module = wrap(how, Sum(), world)
    optim = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    if later:
        extra = sw.load(module, folder, optimizer=optim)
        scheduler.load_state_dict(extra["scheduler"])
        assert extra["at"] == steps.start
    for step in steps:
        x = rows(step, 0) if how == "Pipe" else rows(step, 0)[world.rank :: world.size]
        scale = 1 if how == "Pipe" else world.size
        (scale * module(x, int(step >= 3)).square().sum()).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    if not later:
        extra = {"at": steps.stop, "scheduler": scheduler.state_dict()}
        assert sw.save(module, folder, extra, optimizer=optim).name == "step-000001"
    found = sw.full_state_dict(module)
    return {key: value for key, value in found.items() if not key.endswith("_extra_state")}


def straight(kind: str) -> dict[str, Tensor]:
    """The same in one process without a break."""
    module = Sum()
    optim = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    for step in range(6):
        module(rows(step, 0), int(step >= 3)).square().sum().backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    return dict(module.state_dict())


def run(ranks: int, *args: Any) -> dict[str, Tensor]:
    return part(alone(), *args) if ranks == 1 else run_gloo(ranks, part, *args)[0]


PAIRS = [
    ("AdamW", "FULL_SHARD", 2, "DDP", 1),
    ("SGD", "DDP", 1, "FULL_SHARD", 3),
    ("Adagrad", "SHARD_GRAD_OP", 3, "Pipe", 2),
    ("Own", "Pipe", 2, "FULL_SHARD", 2),
    ("AdamW", "Pipe", 2, "DDP", 1),
    ("Own", "SHARD_GRAD_OP", 3, "DDP", 1),
]


@pytest.mark.parametrize(("kind", "here", "before", "there", "after"), PAIRS)
def test_a_loop_goes_on(tmp_path: Path, kind: str, here: str, before: int, there: str, after: int):
    """On other ranks, wrapped otherwise: as without a break, rates and numbers of states too."""
    run(before, str(tmp_path), here, kind, range(2), False)
    found = run(after, str(tmp_path), there, kind, range(2, 6), True)
    want = straight(kind)
    for key in (key for key in want if not key.endswith("_extra_state")):
        assert torch.allclose(found[key], want[key], rtol=1e-10, atol=1e-12), key


def test_a_checkpoint_of_a_loop_is_one_of_an_engine(tmp_path: Path):
    """`shardwise checkpoint inspect` and `export` read it; saves are numbered and pruned."""
    module = wrap("FULL_SHARD", Sum(), alone())
    optim = optimizer_of("AdamW", module)
    for step in range(4):
        module(rows(step, 0), 1).sum().backward()
        optim.step()
        sw.save(module, tmp_path / "kept", optimizer=optim, keep=2)
    assert sorted(path.name for path in (tmp_path / "kept").glob("step-*")) == [
        "step-000003",
        "step-000004",
    ]
    contents = describe(tmp_path / "kept", deep=True)
    assert contents.parameters == sum(p.numel() for p in module.parameters())
    assert contents.scalars["loop"]["optimizer"] == "AdamW"
    assert export(tmp_path / "kept", tmp_path / "weights").tensors == 9
    assert sw.save(module, tmp_path / "kept", step=70).name == "step-000070"
    assert sw.load(twin(module), tmp_path / "kept") == {}
    assert sw.load(module, tmp_path / "none", missing_ok=True) == {}


def twin(module: nn.Module) -> nn.Module:
    return sw.DDP(type(module)(), alone())


def kept(world: World) -> list[str]:
    """What refuses to take pieces for whole parameters, on a rank of two."""
    module = sw.FSDP(Sum(), world=world)
    optim = torch.optim.Adam(module.parameters())
    whole = torch.optim.Adam((plain := Sum()).parameters())
    plain(rows(0, 0), 1).sum().backward()
    whole.step()
    optim.load_state_dict(whole.state_dict())
    module(rows(0, world.rank), 1).sum().backward()
    acts = [
        optim.step,
        lambda: (optim.state.clear(), optim.step(), optim.load_state_dict(whole.state_dict())),
        optim.state_dict,
        lambda: get_optimizer_state_dict(module, optim),
    ]
    said: list[str] = []
    for act in acts:
        with pytest.raises(InputError) as caught:
            act()
        said.append(str(caught.value))
    module.zero_grad()
    fresh = torch.optim.Adam(module.parameters())  # before any step of the program
    with pytest.raises(InputError):
        get_optimizer_state_dict(module, fresh)
    sw.unwrap(module)
    assert set(torch.optim.Adam(module.parameters()).state_dict()) == {"state", "param_groups"}
    return said


def test_pieces_are_not_taken_for_whole_parameters():
    """State dicts of an optimizer over pieces: an error that says sw.save, or sw.load."""
    for said in run_gloo(2, kept):
        assert ["of the whole parameter" in text for text in said] == [True, True, False, False]
        assert all("sw.load(module, folder, optimizer=optim)" in text for text in said[:2])
        assert all("sw.save(module, folder, optimizer=optim)" in text for text in said[2:])


#: From the wrapped module and its optimizer: an act on the folder of its checkpoint.
BAD: dict[str, tuple[Any, str]] = {
    "a plain module": (lambda *_: partial(sw.save, Sum()), "sw.save of a plain Sum"),
    "an optimizer": (lambda *given: partial(sw.save, given[1]), "sw.save of AdamW"),
    "others' parameters": (
        lambda m, _: partial(sw.save, m, optimizer=torch.optim.SGD(Sum().parameters())),
        "parameters of another module",
    ),
    "another class": (
        lambda m, _: partial(sw.load, m, optimizer=torch.optim.SGD(m.parameters())),
        "states of AdamW, for an optimizer of the class SGD",
    ),
    "other groups": (
        lambda m, _: partial(sw.load, m, optimizer=torch.optim.AdamW(m.parameters())),
        "were not in one group",
    ),
    "an engine": (
        lambda *_: partial(sw.load, sw.parallelize(Sum(), "ddp fp64", alone())),
        "without an engine's state",
    ),
    "an engine's optimizer": (
        lambda *given: partial(sw.save, sw.parallelize(Sum(), "ddp", alone()), optimizer=given[1]),
        "of an engine with optimizer=",
    ),
    "another model": (
        lambda *_: partial(sw.load, sw.DDP(nn.Linear(2, 2).double(), alone())),
        "the checkpoint does not have|which the model does not have",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_one_paragraph(tmp_path: Path, what: str):
    """And nothing is changed."""
    module = sw.DDP(Sum(), alone())
    optim = optimizer_of("AdamW", module)
    sw.save(module, tmp_path, optimizer=optim)
    act, text = BAD[what]
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(InputError, match=text) as caught:
        act(module, optim)(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert all(map(torch.equal, before, module.parameters()))


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path):
    """An object in a state, or in a module's extra state."""
    module = sw.DDP(Sum(), alone())
    optim = optimizer_of("AdamW", module)
    optim.state[module.get_parameter("chain.2.weight")]["helper"] = {"of": [object()]}
    match = r"the optimizer's state of chain\.2\.weight, in which 'helper\.of\.0' is a object"
    with pytest.raises(InputError, match=match):
        sw.save(module, tmp_path, optimizer=optim)
    module.get_submodule("chain.0").get_extra_state = object
    with pytest.raises(InputError, match=r"the extra state of chain\.0 \(Counted\), in which"):
        sw.save(module, tmp_path)
