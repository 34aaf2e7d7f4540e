"""Where stages begin, by any count, and which modules are units, by any rule."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError
from shardwise.models import gpt
from shardwise.models.gpt import GPT, SIZES, Block
from shardwise.models.registry import find
from shardwise.techniques.pipeline.partition import balance_by_time, calls_of, starts
from shardwise.wrap.wrap_policy import UnitSpec, choose
from tests.engine.zoo import ClassToken, Lists, Stack
from tests.pool import run_threads


def small(layers: int = 6, tied: bool = False, vocabulary: int = 8) -> gpt.GPT:
    return gpt.GPT(gpt.GPTConfig(vocabulary, layers, 8, 2, 2, 8, 8, tied))


def linears(width: int, count: int) -> list[nn.Linear]:
    return [nn.Linear(width, width) for _ in range(count)]


def of(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


#: What is cut, in how many stages, and where.
CUT: dict[str, tuple[Callable[[], nn.Module], int, tuple[str, ...]]] = {
    "blocks of equal weight": (small, 3, ("blocks.2", "blocks.4")),
    "heavy ends": (lambda: small(vocabulary=200), 3, ("blocks.1", "blocks.5")),
    "a tied head weighs twice": (lambda: small(6, True, 200), 3, ("blocks.1", "blocks.5")),
    "more stages than blocks": (
        lambda: small(2, vocabulary=112),
        4,
        ("blocks.0", "blocks.1", "head"),
    ),
    "a sequential": (
        lambda: nn.Sequential(*[m for n in linears(4, 2) for m in (n, nn.ReLU())], nn.Linear(4, 4)),
        3,
        ("2", "4"),
    ),
    "lists in a list, which are not called": (
        lambda: of(blocks=nn.ModuleList(nn.ModuleList(linears(4, 2)) for _ in range(2))),
        4,
        ("blocks.0.1", "blocks.1.0", "blocks.1.1"),
    ),
    "a small list goes with its neighbour": (
        lambda: of(blocks=nn.ModuleList(linears(30, 2)), head=nn.Sequential(*linears(4, 2))),
        2,
        ("blocks.1",),
    ),
    "llama": (lambda: find("toy:llama").build(), 2, ("model.layers.1",)),
    "an encoder and a decoder": (
        lambda: find("toy:bart").build(),
        4,
        ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"),
    ),
}


@pytest.mark.cases(20)
@pytest.mark.parametrize("what", CUT)
def test_where_stages_begin(what: str):
    """Between what repeats, so that stages weigh as equally as they can."""
    pytest.importorskip("transformers")
    make, stages, wanted = CUT[what]
    assert starts(make(), stages) == wanted


def test_a_layer_that_is_never_called_begins_no_stage():
    """It is in the stage of the layer that is defined before it; the loss makes a constant."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.used(x + torch.zeros(1, dtype=x.dtype, device=x.device))

    model = of(used=nn.Sequential(*linears(4, 3)), never=nn.ModuleList(linears(4, 4)))
    calls = calls_of(model, loss)
    assert starts(model, 2, calls=calls) == ("used.2",)


@pytest.mark.parametrize("counts", [(1, 3, 2), (4, 1, 1)])
def test_a_plan_counts_the_blocks_of_stages(counts: tuple[int, ...]):
    """Each rank holds the next so many, and no other."""
    plan, first = f"pp3 1f1b:3 stages:{','.join(map(str, counts))}", 0
    for rank, count in enumerate(counts):
        names = [box.name for box in sw.parallelize(small(), plan, traced(rank, 3)).boxes()]
        held = {int(found[1]) for name in names if (found := re.search(r"blocks\.(\d+)", name))}
        assert held == {*range(first, first + count)}
        assert any("embed" in name for name in names) == (rank == 0)
        assert any("head" in name for name in names) == (rank == 2)
        first += count


class Clock(threading.local):
    """A clock that only layers move: one for each thread, that is each rank."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return x + self.weight


def timed(world: World, clock: Clock) -> tuple[str, ...]:
    """The cut by a clock that goes differently on every rank."""
    model = nn.Sequential(*[Slow(clock, s) for s in [(1, 1, 9, 1), (9, 1, 1, 1)][world.rank]])
    assert starts(model, 3) == ("1", "2")
    found = balance_by_time(model, lambda m: m(torch.zeros(1)), 3, world=world)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model)
    return found


def test_stages_by_time_balance_what_layers_take(monkeypatch: pytest.MonkeyPatch):
    """One slow layer of four is a stage of its own; the first rank's times decide for all."""
    clock = Clock()
    monkeypatch.setattr("shardwise.techniques.pipeline.partition.time", clock)
    assert run_threads(2, timed, clock) == [("2", "3")] * 2


class Leaf(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        if shared is not None:
            self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x


def tied_between_blocks() -> Stack:
    one, two = Leaf(), Leaf()
    two.own.weight = one.own.weight
    return Stack(one, two)


def names(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


def held(specs: list[UnitSpec]) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in specs}


MODELS: dict[str, Any] = {
    "gpt": lambda: small(3, vocabulary=16),
    "gpt tied": lambda: small(3, True, 16),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3
    ),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "class token": ClassToken,
    "one layer": lambda: nn.Linear(2, 2),
    "listed blocks": lambda: Stack(Lists(), Lists()),
    "same module twice": lambda: Stack(*[Leaf()] * 3),
    "shared inside": lambda: Stack(*map(Leaf, [nn.Linear(2, 2)] * 2)),
    "tied between blocks": tied_between_blocks,
    "weight norm": lambda: Stack(parametrizations.weight_norm(nn.Linear(2, 2, bias=False)), Leaf()),
    "empty list": lambda: nn.Sequential(nn.ModuleList(), nn.Linear(2, 2), nn.Identity()),
}


@pytest.mark.cases(4 * len(MODELS))
@pytest.mark.parametrize("rule", ["auto", 1, 200, 2**20])
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_unit_and_under_a_module_that_is_called(model: str, rule: Any):
    """Whatever the model and the rule, no parameter is left out, twice in, or out of reach."""
    root = MODELS[model]()
    specs = choose(root, rule)
    found = [id(p) for spec in specs for _, p in spec.params]
    assert sorted(found) == sorted(id(p) for p in root.parameters())
    for spec in specs:
        inside = {id(p) for module in spec.modules for p in module.parameters()}
        assert {id(p) for _, p in spec.params} <= inside
        for module in spec.modules:
            assert type(module).forward is not nn.Module.forward, f"{spec.name} is never called"


def test_the_units_of_models():
    """Blocks with what stands around them, in the order of use; ties are above both users."""
    specs = choose(small(3, vocabulary=16), least=33, most=33)
    assert names(specs) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert held(specs)["norm"] == ["norm.weight", "head.weight"]
    with torch.device("meta"):
        assert len(choose(GPT(SIZES["small"]), least=2**20, most=2**21)) == 10
    tied = choose(small(3, True, 16))[0]
    assert (tied.name, tied.shared, *held([tied])[""]) == ("", True, "embed.weight")
    assert isinstance(tied.modules[0], GPT)
    found = held(choose(ClassToken()))
    assert found[""] == ["token"]
    assert "layers.0.self_attn.out_proj.weight" in found["layers.0"]
    # the projection is read, and not called
    found = held(choose(nn.TransformerEncoderLayer(8, 2, 8), 1))
    assert {"self_attn.in_proj_weight", "self_attn.out_proj.weight"} <= set(found["self_attn"])
    specs = choose(tied_between_blocks(), Leaf)
    assert isinstance(next(spec for spec in specs if spec.shared).modules[0], Stack)
    shared = nn.Linear(2, 2)
    assert any(s.modules == [shared] for s in choose(Stack(Leaf(shared), Leaf(shared))))


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "rule",
    [
        Block,
        (Block, nn.Embedding),
        "blocks.*",
        "blocks*",
        lambda name, _: name.startswith("blocks.") and name.count(".") == 1,
    ],
)
def test_blocks_by_any_rule(rule: Any):
    """A class, several, a pattern, a function: the outermost module that fits is a unit."""
    found = names(choose(small(3, vocabulary=16), rule))
    assert [n for n in found if n.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(choose(small(3, vocabulary=16), "blocks.0*"))[:3] == [
        "embed",
        "blocks.0",
        "blocks.1.attn_norm",
    ]


def test_sizes_of_units():
    """units=BYTES joins neighbours while they fit; below `least` a unit joins its neighbour."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(5)]
    specs = choose(nn.Sequential(*layers, nn.Linear(4, 40)), 128)
    assert [spec.stored_bytes for spec in specs] == [128, 128, 64, 800]
    for least, sizes in ((65, [192, 128]), (64, [64] * 5)):
        specs = choose(nn.Sequential(*layers), "auto", least=least, most=200)
        assert [s.stored_bytes for s in specs] == sizes


BAD: list[tuple[Any, str]] = [
    (nn.Conv2d, "matches no module"),
    ("layers.*", "matches no module"),
    (lambda *_: False, "matches no module"),
    ("blocks", "matches no module that GPT calls"),
    *((size, "positive number of bytes") for size in (0, -5)),
    *((rule, "a class, a pattern, a size or a function") for rule in (1.5, None, True, (1, 2))),
    (lambda _: True, "too many positional arguments"),
    (lambda: True, "units=<lambda>, which fails"),
    (lambda *_: None, "returns None for the module embed"),
    (lambda name, _: name, r"returns 'embed'.*True or False"),
]


@pytest.mark.cases(len(BAD))
@pytest.mark.parametrize(("rule", "said"), BAD)
def test_a_rule_that_cannot_work_is_refused_with_what_would(rule: Any, said: str):
    """The error names the rule and modules that could be meant."""
    with pytest.raises(InputError, match=said):
        choose(small(3, vocabulary=16), rule)
