"""The wrap policy: which modules are units, by any rule; every parameter is in one of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shardwise.core.errors import InputError
from shardwise.models.gpt import GPT, SIZES, Block, GPTConfig
from shardwise.techniques.data.wrap_policy import UnitSpec, choose

CONFIG = GPTConfig(
    vocabulary=16, layers=3, width=8, heads=2, kv_heads=2, hidden=8, sequence=4, tied=False
)


class Calls(nn.Module):
    """A module that has a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Patches(Calls):
    """A vision transformer in outline: a class token at the root, blocks in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)


class Layer(Calls):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        if shared is not None:
            self.shared = shared


class Tower(Calls):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Listed(Calls):
    """Its parameters stand in lists, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(2) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.zeros(2)})


def gpt(tied: bool = False) -> nn.Module:
    return GPT(GPTConfig(**{**CONFIG.__dict__, "tied": tied}))


def tied_between_blocks() -> Tower:
    one, two = Layer(), Layer()
    two.own.weight = one.own.weight
    return Tower(one, two)


def names(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


def held(specs: list[UnitSpec]) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in specs}


MODELS: dict[str, Any] = {
    "gpt": gpt,
    "gpt tied": lambda: gpt(tied=True),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3
    ),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "class token": Patches,
    "one layer": lambda: nn.Linear(2, 2),
    "listed blocks": lambda: Tower(Listed(), Listed()),
    "same module twice": lambda: Tower(*[Layer()] * 3),
    "shared inside": lambda: Tower(*map(Layer, [nn.Linear(2, 2)] * 2)),
    "tied between blocks": tied_between_blocks,
    "weight norm": lambda: Tower(
        parametrizations.weight_norm(nn.Linear(2, 2, bias=False)), Layer()
    ),
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
    specs = choose(gpt(), least=33, most=33)
    assert names(specs) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert held(specs)["norm"] == ["norm.weight", "head.weight"]
    with torch.device("meta"):
        assert len(choose(GPT(SIZES["small"]), least=2**20, most=2**21)) == 10
    tied = choose(gpt(tied=True))[0]
    assert (tied.name, tied.shared, *held([tied])[""]) == ("", True, "embed.weight")
    assert isinstance(tied.modules[0], GPT)
    found = held(choose(Patches()))
    assert found[""] == ["token"]
    assert "layers.0.self_attn.out_proj.weight" in found["layers.0"]
    # the projection is read, and not called
    found = held(choose(nn.TransformerEncoderLayer(8, 2, 8), 1))
    assert {"self_attn.in_proj_weight", "self_attn.out_proj.weight"} <= set(found["self_attn"])
    specs = choose(tied_between_blocks(), Layer)
    assert isinstance(next(spec for spec in specs if spec.shared).modules[0], Tower)
    shared = nn.Linear(2, 2)
    assert any(s.modules == [shared] for s in choose(Tower(Layer(shared), Layer(shared))))


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
    found = names(choose(gpt(), rule))
    assert [n for n in found if n.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(choose(gpt(), "blocks.0*"))[:3] == ["embed", "blocks.0", "blocks.1.attn_norm"]


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
        choose(gpt(), rule)


def test_a_model_without_parameters_is_refused():
    """There would be nothing to train."""
    with pytest.raises(InputError, match="without parameters"):
        choose(nn.Sequential(nn.ReLU()))
