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


class Plain(Calls):
    """No list of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 4)


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


def sharing(module: nn.Module) -> nn.Module:
    return Tower(Layer(module), Layer(module))


class Listed(Calls):
    """Its parameters stand in lists, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(2) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.zeros(2)})


def names(specs: list[UnitSpec]) -> list[str]:
    return [spec.name for spec in specs]


def held(specs: list[UnitSpec]) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in specs}


def covers(root: nn.Module, specs: list[UnitSpec]) -> bool:
    """Whether every parameter is in exactly one unit, and inside a module whose call uses it."""
    found = [id(p) for spec in specs for _, p in spec.params]
    inside = all(
        any(p is q for module in spec.modules for q in module.parameters())
        for spec in specs
        for _, p in spec.params
    )
    return inside and sorted(found) == sorted(id(p) for p in root.parameters())


MODELS = {
    "gpt": lambda: GPT(CONFIG),
    "gpt tied": lambda: GPT(GPTConfig(**{**CONFIG.__dict__, "tied": True})),
    "sequential": lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3
    ),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "class token": Patches,
    "plain": Plain,
    "one layer": lambda: nn.Linear(2, 2),
    "lists of parameters": Listed,
    "listed blocks": lambda: Tower(Listed(), Listed()),
    "same module twice": lambda: Tower(*[Layer()] * 3),
    "shared inside": lambda: sharing(nn.Linear(2, 2)),
    "weight norm": lambda: Tower(
        parametrizations.weight_norm(nn.Linear(2, 2, bias=False)), Layer()
    ),
    "empty list": lambda: nn.Sequential(nn.ModuleList(), nn.Linear(2, 2), nn.Identity()),
}


@pytest.mark.parametrize("rule", ["auto", 1, 200, 2**20])
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_unit_and_under_a_module_that_is_called(model, rule):
    """Whatever the model and the rule, no parameter is left out, twice in, or out of reach."""
    root = MODELS[model]()
    specs = choose(root, rule)
    assert covers(root, specs)
    for spec in specs:
        for module in spec.modules:
            assert type(module).forward is not nn.Module.forward, f"{spec.name} is never called"


def test_the_blocks_of_a_gpt_are_units_with_what_stands_around_them():
    """The units are embed | blocks | norm and head, in the order in which they are used."""
    specs = choose(GPT(CONFIG), least=33, most=33)
    assert names(specs) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert held(specs)["norm"] == ["norm.weight", "head.weight"]


def test_the_quickstart_gpt_has_its_layers_for_units():
    """The automatic choice on a size that people train."""
    with torch.device("meta"):
        assert len(choose(GPT(SIZES["small"]), least=2**20, most=2**21)) == 10


def test_tied_embeddings_are_one_unit_around_all_others():
    """A parameter of two modules belongs to the smallest module that holds both."""
    specs = choose(GPT(GPTConfig(**{**CONFIG.__dict__, "tied": True})))
    tied = specs[0]
    assert tied.name == "" and tied.shared and isinstance(tied.modules[0], GPT)
    assert [name for name, _ in tied.params] == ["embed.weight"]


def test_a_class_token_at_the_root_belongs_to_the_root():
    """What the root reads itself is whole while the root runs; the blocks stay units."""
    model = Patches()
    found = held(choose(model))
    assert found[""] == ["token"]
    assert {"layers.0", "layers.1"} <= found.keys()
    assert "layers.0.self_attn.out_proj.weight" in found["layers.0"]


def test_attention_keeps_its_projection_which_it_reads_without_calling():
    """nn.MultiheadAttention is not divided, by any size, for out_proj's forward never runs."""
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    found = held(choose(layer, 1))
    assert {"self_attn.in_proj_weight", "self_attn.out_proj.weight"} <= set(found["self_attn"])


def test_weights_tied_between_blocks_are_under_the_module_that_runs_them():
    """The common root of two blocks is their list, which is never called: its owner is taken."""
    one, two = Layer(), Layer()
    two.own.weight = one.own.weight
    specs = choose(Tower(one, two), Layer)
    tied = next(spec for spec in specs if spec.shared)
    assert isinstance(tied.modules[0], Tower)


def test_a_module_registered_twice_is_a_unit_of_its_own():
    """What two blocks share is whole whenever it is itself called, wherever from."""
    shared = nn.Linear(2, 2)
    specs = choose(Tower(Layer(shared), Layer(shared)))
    assert any(spec.modules == [shared] for spec in specs)


RULES = {
    "class": Block,
    "classes": (Block, nn.Embedding),
    "pattern": "blocks.*",
    "pattern that also fits the list": "blocks*",
    "callable": lambda name, _: name.startswith("blocks.") and name.count(".") == 1,
}


@pytest.mark.parametrize("rule", RULES)
def test_blocks_by_any_rule(rule):
    """A class, several, a pattern of names, a function: the outermost fitting module is a unit."""
    model = GPT(CONFIG)
    specs = choose(model, RULES[rule])
    assert [n for n in names(specs) if n.startswith("blocks")] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    assert covers(model, specs)


def test_nested_fits_give_the_outermost():
    """A rule that fits a block and its inside gives the block."""
    found = names(choose(GPT(CONFIG), "blocks.0*"))
    assert found[:3] == ["embed", "blocks.0", "blocks.1.attn_norm"]


def test_a_size_fills_units_up_to_it():
    """units=BYTES: neighbours are joined while they fit; a single larger module stands alone."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)], nn.Linear(4, 40))
    sizes = [spec.stored_bytes for spec in choose(layers, 128)]
    assert sizes == [128, 128, 64, 800]


def test_small_neighbours_are_merged_up_to_a_bound():
    """Below `least` bytes a unit joins its neighbour, as long as both fit into `most`."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    assert [s.stored_bytes for s in choose(layers, "auto", least=65, most=200)] == [192, 128]
    assert [s.stored_bytes for s in choose(layers, "auto", least=64, most=200)] == [64] * 5


BAD = {
    "no such class": (nn.Conv2d, "matches no module"),
    "no such name": ("layers.*", "matches no module"),
    "never": (lambda *_: False, "matches no module"),
    "a list nobody calls": ("blocks", "matches no module that GPT calls"),
    "zero": (0, "positive number of bytes"),
    "negative": (-5, "positive number of bytes"),
    "not a rule": (1.5, "a class, a pattern, a size or a function"),
    "nothing": (None, "a class, a pattern, a size or a function"),
    "true": (True, "a class, a pattern, a size or a function"),
    "sizes": ((1, 2), "a class, a pattern, a size or a function"),
    "a function of the name alone": (lambda _: True, r"too many positional arguments"),
    "a function of nothing": (lambda: True, r"units=<lambda>, which fails"),
    "no answer": (lambda *_: None, r"returns None for the module embed"),
    "no yes or no": (lambda name, _: name, r"returns 'embed'.*True or False"),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_rule_that_cannot_work_is_refused_with_what_would(rule):
    """The error names the rule and modules that could be meant."""
    given, text = BAD[rule]
    with pytest.raises(InputError, match=text):
        choose(GPT(CONFIG), given)


def test_a_model_without_parameters_is_refused():
    """There would be nothing to train."""
    with pytest.raises(InputError, match="without parameters"):
        choose(nn.Sequential(nn.ReLU()))
