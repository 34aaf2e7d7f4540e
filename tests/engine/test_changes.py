"""Models that change after they were wrapped: refused in the next forward, never trained apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.tools.structure import Structure
from tests.engine.cases import difference, settled, squares
from tests.engine.loops import rows
from tests.pool import run_threads


class Net(nn.Module):
    """A frozen trunk, a trained head, and room for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 6)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(self.enter(x)))
        return self.head(h if self.adapter is None else h + self.adapter(h))


def build() -> Any:
    model = settled(Net()).double()
    model.trunk.requires_grad_(False)
    return model


def layer(out: int = 6) -> nn.Module:
    return settled(nn.Linear(6, out)).double()


def adapter(model: Any) -> None:
    model.adapter = layer()


def new_head(model: Any) -> None:
    model.head = layer(3)


def new_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))


def tie(model: Any) -> None:
    model.head.weight = model.enter.weight


def unfreeze(model: Any) -> None:
    model.trunk.requires_grad_(True)


Change = Callable[[Any], None]
CHANGES = {
    adapter: r"adapter \(new\)",
    new_head: r"head \(replaced\)",
    new_weight: r"head\.weight \(replaced\)",
    tie: r"head\.weight \(replaced\)",
    unfreeze: r"unfrozen .*trunk\.0\.weight",
}
WRAPS: dict[str, Callable[[nn.Module, World], Any]] = {
    "DDP": sw.DDP,
    "FSDP": lambda model, world: sw.FSDP(model, units=1, world=world),
    "Pipe": lambda model, world: sw.Pipe(model, 1, world=world),
}


def train(model: Any, shares: list[int], first: int, *, mean: bool = False) -> None:
    """Two steps."""
    optim = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in (first, first + 1):
        optim.zero_grad()
        for rank in shares:
            loss = model(rows(step, rank)).square().mean()
            (loss / len(shares) if mean else loss).backward()
        optim.step()


def changed_late(world: World, how: str, change: Change, said: str) -> dict[str, Tensor]:
    """Refused by forward and full_state_dict; then unwrapped, changed and wrapped again."""
    model = WRAPS[how](build(), world)
    train(model, [world.rank], 0)
    before = {m: dict(m._modules) | dict(m._parameters) for m in model.modules()}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    change(model)
    for act in (lambda: model(rows(0, 0)), lambda: sw.full_state_dict(model)):
        with pytest.raises(InputError, match=f"{said}.*sw.unwrap"):
            act()
    for module, parts in before.items():  # as the error says
        for key, part in parts.items():
            if getattr(module, key) is not part:
                setattr(module, key, part)
    model.adapter = None
    for p in frozen:
        p.requires_grad_(False)
    plain = sw.unwrap(model)
    change(plain)
    model = WRAPS[how](plain, world)
    train(model, [world.rank], 2)
    return sw.full_state_dict(model)


@pytest.mark.parametrize("how", ["DDP", "FSDP"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_wrapping_is_refused_and_the_documented_way_is_one_process(change, how):
    """Unwrapped, changed and wrapped again it trains as one process does."""
    plain = build()
    train(plain, [0, 1], 0, mean=True)
    change(plain)
    train(plain, [0, 1], 2, mean=True)
    state = run_threads(2, changed_late, how, change, CHANGES[change])[0]
    for name, value in plain.state_dict().items():
        assert difference(state[name], value) <= 1e-10, name


def pipe_changed(world: World, change: Change, said: str) -> None:
    model = WRAPS["Pipe"](build(), world)
    train(model, [0], 0)
    change(model)
    acts = (lambda: model(rows(0, 0)), lambda: sw.full_state_dict(model), lambda: sw.unwrap(model))
    for act in acts:
        with pytest.raises(InputError, match=said):
            act()


@pytest.mark.parametrize("change", [adapter, new_head], ids=lambda change: change.__name__)
def test_a_pipe_refuses_a_change_on_every_rank(change):
    """Also where the changed layer is another rank's; unwrapping would put the old one back."""
    run_threads(2, pipe_changed, change, CHANGES[change])


def engine_changed(world: World, plan: str, change: Change, said: str, folder: str) -> None:
    engine = sw.parallelize(
        build(), plan, world, optimizer=sw.SGD(lr=0.1), loss=squares, least_unit_bytes=0
    )
    engine.step(rows(0, 0))
    change(engine.model)
    acts = (
        lambda: engine.step(rows(0, 0)),
        lambda: engine.evaluate(rows(0, 0)),
        lambda: sw.full_state_dict(engine),
        lambda: sw.save(engine, folder),
    )
    for act in acts:
        with pytest.raises(InputError, match=f"{said}.*a new engine"):
            act()


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("plan", "change"),
    [
        *(("zero3 fp64", new_weight), ("ddp fp64", new_weight), ("ddp fp64", unfreeze)),
        ("pp2 1f1b:1 fp64", adapter),
    ],
)
def test_an_engine_refuses_a_change_of_its_model(plan, change, tmp_path):
    """In step, evaluate, full_state_dict and save, in the same words."""
    run_threads(2, engine_changed, plan, change, CHANGES[change], str(tmp_path))


def test_parameters_lent_for_an_evaluation_are_no_change():
    """torch.func.functional_call of averaged weights, with and without a gradient, under DDP."""
    plain, model = build(), sw.DDP(build(), alone())
    lent = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    with torch.no_grad():
        found = functional_call(model, lent, (rows(0, 0),))
        assert difference(found, functional_call(plain, lent, (rows(0, 0),))) == 0
    functional_call(model, lent, (rows(0, 0),))
    model(rows(0, 0)).sum().backward()


def test_a_part_that_is_compiled_in_its_place_is_no_change():
    """torch.compile(part) has the same parameters; anything else in its place is refused."""
    model = build()
    structure = Structure(model, [])
    model.head = torch.compile(model.head, backend="eager")
    structure.require_unchanged()
    structure.require_unchanged()
    model.head = layer()
    with pytest.raises(InputError, match=r"head \(replaced\)"):
        structure.require_unchanged()
