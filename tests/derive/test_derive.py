"""Tables of tensor parallelism: where they come from, what shapes they give; derived ones hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import STYLES, Table, assign, cuts, matches
from shardwise.core.plan.plan import Plan
from shardwise.derive.table import Derived, derive_table
from shardwise.engine.predict import predict
from shardwise.models import hf
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.registry import find
from shardwise.techniques.tensor.hf_tables import _DECODERS, _STYLES
from shardwise.techniques.tensor.source import own_table, shapes, table_of
from shardwise.techniques.tensor.table_check import check
from shardwise.train import config
from shardwise.train.prepare import RunStart, prepare
from shardwise.verify.inputs import Options, table_in
from tests.derive import models
from tests.train.runs import model_folder, pretrained, printed, run
from tests.verify.test_command import shortly

HAND = Path(__file__).with_name("models.py")
HOW_TO = Path(__file__).parents[2] / "docs/how-to"
TYPES = [
    *("gpt2", "bloom", "bert", "t5", "llama", "mistral", "qwen3", "gemma2", "phi3", "opt"),
    "gpt_neox",
]
#: Those whose tables are proved under sp, with the same styles.
SEQUENCE = ["gpt2", "bert", "llama", "mistral", "qwen3", "gemma2", "gpt_neox"]
#: Modules that are sharded of each: every pair of layers, and the vocabulary.
MODULES = {
    "convolution": "embed, body.1.up, body.1.down, head",
    "recurrent": "embed, body.1.up, body.1.down, head",
    "packed": "embed, body.0.inner.qkv, body.0.inner.out, body.1.up, body.1.down, head",
    "tied": "embed, body.0.up, body.0.down, head",
}
EMBED = {"embed": "vocabulary:sequence", "norm": "sequence"}
#: Entries for sp: the embedding or a module splits the stream, norms act on shards, attention
#: gathers.
ENTRIES = {
    "tied": EMBED,
    "packed": {"body.*.inner": "gather", **EMBED},
    "convolution": {"body.1": "split", "norm": "sequence"},
    "gpt": {
        **{f"blocks.*.{part}": "gather" for part in ("attn", "mlp")},
        **{f"blocks.*.{part}_norm": "sequence" for part in ("attn", "mlp")},
        **EMBED,
    },
}


def derived(name: str, ranks: int = 2, *, sp: bool = False) -> Derived:
    found = find(name)
    return derive_table(found.build(), found.batch(2, 0), ranks, found.loss, sp=sp)


def named(name: str) -> str:
    return f"{HAND}:{name}" if hasattr(models, name) else name


def holds(name: str, plan: str, table: sw.Table) -> bool:
    return shortly(f"{plan} fp64", name, Options(table=table)).holds


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, "tp2") for name in (*MODULES, "encoder_decoder")),
        *(("packed", plan) for plan in ("tp4", "dp2 tp2 zero3", "tp2 pp2 1f1b:2")),
        ("encoder_decoder", "tp3"),  # which does not divide the heads: the table counts them
    ],
)
def test_the_table_of_a_model_written_by_hand_holds(name: str, plan: str):
    """Parity, bytes and memory; and every layer that can be sharded is."""
    table = derived(named(name), Plan.parse(plan).mesh.size_of("tp")).table
    assert holds(named(name), plan, table)
    modules = [module for module, _ in find(named(name)).build().named_modules()]
    if name in MODULES:
        assert {*matches(table, modules, sp=False)} == {*MODULES[name].split(", ")}
    if plan == "tp3":
        assert table.heads == 4
        assert table.sets


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRIES)
def test_the_entries_for_sequence_parallelism_hold(name: str):
    """Parity, bytes and memory of tp2 sp."""
    table = derived(named(name), sp=True).table
    assert dict(table.sequence) == ENTRIES[name]
    assert holds(named(name), "tp2 sp", table)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", *(f"toy:{kind}" for kind in TYPES)])
def test_the_table_of_an_architecture_holds_and_sends_no_more_than_its_own(name: str):
    """Those with a table of the library or ours are compared; of the GPT only norms stay whole."""
    pytest.importorskip("transformers")
    found, trainable = derived(name), find(name)
    assert name != "gpt" or all("norm" in each.name for each in found.whole)
    model = trainable.build()
    own = own_table(model)
    if own is not None:
        shipped = predict(model, "tp2", trainable.batch(2, 0), loss=trainable.loss, table=own)
        assert found.sent_bytes <= sum(n for line, n in shipped.sent().items() if line.axis == "tp")
    if name.removeprefix("toy:") in SEQUENCE:
        of_shards = derived(name, sp=True).table
        assert found.table.styles == of_shards.styles
        assert holds(name, "tp2 sp", of_shards)
    else:
        assert holds(name, "tp2", found.table)


WHOLE = [
    ("one_key", "body.*.inner.q", "a replicated tensor is combined with it"),
    ("scaled", "body.*.up", "the parameter body.0.between.scale has it"),
    ("shifted", "body.*.up", "a constant or the batch has its size"),
    ("convolution", "body.*.mix", "no layer of features in and out"),
    ("chain", "8", "no other layer reads its output"),  # of five in a row
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "layer", "why"), WHOLE)
def test_what_is_not_understood_stays_whole(name: str, layer: str, why: str):
    """It is named with the reason, and the rest of the table holds."""
    found = derived(named(name))
    assert why in {each.name: each.why for each in found.whole}[layer]
    assert holds(named(name), "tp2", found.table)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("encoder_decoder", "flip in body.0 mixes positions between the sharded layers"),
        ("recurrent", "no pair of sharded layers is given the positions"),
        ("chain", "no embedding shows which dim has the positions"),
    ],
)
def test_sequence_parallelism_of_what_is_not_understood_is_refused(name: str, why: str):
    """With the operation or the module that is in the way."""
    with pytest.raises(InputError, match=f"^Given: sp of a .*{why}"):
        derived(named(name), sp=True)


def test_the_model_stays_as_it_was():
    """A module in use: its weights, gradients, buffers and mode do not change."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    x = torch.arange(24.0).view(4, 6).sin()
    found = sw.derive_table(model, x, ranks=2, loss=lambda m, x: m(x).square().mean())
    assert dict(found.table.styles) == {"0": "colwise", "2": "rowwise"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.full
def test_commands_derive_the_table_or_take_it_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`table` prints a file; `predict` and `verify` need none, and predict the same with it."""
    name, file = named("tied"), tmp_path / "table.toml"
    file.write_text(printed(capsys, "table", name, "--tp", "2", "--sp"))
    assert table_in(file) == derived(name, sp=True).table
    assert '[sequence]\nembed = "vocabulary:sequence"\nnorm = "sequence"\n' in file.read_text()
    assert "bytes stay whole on every rank:" in file.read_text()

    def memory(plan: str, *argv: str) -> dict[str, int]:
        text = printed(capsys, "predict", plan, "--model", name, *argv, "--json")
        return json.loads(text)["memory"]

    whole = memory("tp2 sp")
    assert whole == memory("tp2 sp", "--table", str(file))
    assert whole["parameters"] < memory("dp1")["parameters"]
    assert "It holds." in printed(capsys, "verify", "tp2 sp", "--model", name)


@pytest.mark.full
def test_a_run_derives_the_table(tmp_path: Path):
    """`train` of a folder of opt, which has no table: the losses are those of one process."""
    weights = model_folder("opt", tmp_path / "w")
    expected = [each.loss for each in run(pretrained(tmp_path / "one", weights, "fp64", steps=3))]
    given = pretrained(tmp_path / "two", weights, "tp2 zero1 fp64", steps=3)
    assert [each.loss for each in run(given, ranks=2)] == pytest.approx(expected, rel=1e-10)


def test_a_run_takes_a_table_from_a_file(tmp_path: Path):
    """`plan.table` replaces what would be derived; a file without a table is refused."""
    weights, file = model_folder("opt", tmp_path / "w"), tmp_path / "table.toml"
    styles = {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    file.write_text("\n".join(f'"{name}" = "{style}"' for name, style in styles.items()))
    base = pretrained(tmp_path / "run", weights, "tp2", steps=2)
    table = prepare(base, 2, RunStart()).table
    assert isinstance(table, Table) and table.derived
    given = config.build(base.model_dump() | {"plan": {"text": "tp2", "table": str(file)}})
    table = prepare(given, 2, RunStart(overwrite=True)).table
    assert isinstance(table, Table) and dict(table.styles) == styles
    file.write_text("")
    with pytest.raises(InputError, match=r"plan\.table = .*which has no styles"):
        prepare(given, 2, RunStart(overwrite=True))


# --- tables of models, and of the user -----------------------------------------------------------

NAMES = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "mixtral"]
CONFIG = GPTConfig(
    vocabulary=37, layers=2, hidden_size=48, heads=6, kv_heads=2, intermediate_size=50, sequence=8
)


def made(name: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = hf.small_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp sp"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_tables_of_transformers_fit(name: str, ranks: int, sp: bool):
    """Each named type has a table, from its configuration or ours; 4 ranks share 2 key heads."""
    model = made(name)
    table, modules = table_of(model), shapes(model)
    assert check(table, modules, sp, ranks) == []
    styles = assign(table, list(modules), sp)
    cut = {key for key, style in styles.items() if cuts(style, modules[key], table, ranks)}
    whole = {key for key, shape in modules.items() if shape.kind == "linear"} - cut
    assert whole == set()


def test_what_works_on_the_sequence_in_a_decoder():
    """Norms of the residual stream, not those in attention; experts token by token."""
    qwen = dict(table_of(made("qwen3")).sequence)
    assert "model.layers.*.self_attn.q_norm" not in qwen
    mixed = dict(table_of(made("qwen3_moe", mlp_only_layers=[1])).sequence)
    assert mixed["model.layers.1.mlp"] == "gather"
    assert mixed["model.layers.*.mlp.gate"] == "sequence"  # layer 1 has none
    assert "model.layers.*.mlp" not in mixed


def test_plans_of_configurations_are_read():
    """A style for the sequence would be read; one that we lack is refused, with the module. A model
    without its head has the same table: the plan is the base model's.
    """
    model = made("llama")
    model._tp_plan = model._tp_plan | {"model.norm": "sequence_parallel"}
    model.config.model_type = "unheard of"
    assert table_of(model).sequence == (("model.norm?", "sequence"),)
    with pytest.raises(InputError, match=r'"mla_kv_a_proj" for model.layers.\*.self_attn.kv_a'):
        table_of(made("deepseek_v2"))
    model = made("mistral").model
    table, modules = table_of(model), shapes(model)
    assert dict(table.styles)["layers.*.self_attn.q_proj?"] == "colwise:heads"
    assert check(table, modules, sp=True, ranks=4) == []


# --- models of the user's ----------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)


def test_what_the_user_gives_comes_first():
    """A Table as it is; a dict with the model's own number of heads; a part brings its table."""
    given = Table.of({"up": "colwise"}, heads=2)
    model: Any = Two()
    assert table_of(model, given) is given
    assert table_of(model, {"up": "colwise"}) == Table.of({"up": "colwise"})
    model.tensor_table = {"down": "colwise"}
    assert table_of(model) == Table.of({"down": "colwise"})
    assert table_of(model, {"up": "colwise"}) == Table.of({"up": "colwise"})
    assert table_of(GPT(CONFIG), {"blocks.*.attn.q": "colwise:heads"}).kv_heads == 2
    outer = nn.ModuleDict({"policy": GPT(CONFIG), "value": nn.Linear(48, 1)})
    assert ("policy.blocks.*.attn.q", "colwise:heads") in table_of(outer).styles
    assert check(table_of(outer), shapes(outer), sp=False, ranks=2) == []


def test_modules_as_a_table_sees_them():
    """Ties; what has no parameters is there; what nn.MultiheadAttention never calls is no layer."""
    embed, head = nn.Embedding(10, 8), nn.Linear(8, 10)
    head.weight, attn = embed.weight, nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"embed": embed, "attn": attn, "drop": nn.Dropout(), "head": head})
    seen = shapes(model)
    assert (seen["head"].kind, seen["head"].bias, seen["head"].tied) == ("linear", True, "embed")
    assert seen["attn.out_proj"].kind == "other"
    assert ("num_heads", 2) in seen["attn"].numbers and not seen["drop"].parameters
    (problem, *_) = check(Table.of({"attn.out_proj": "rowwise"}), seen, sp=False, ranks=2)
    assert "NonDynamicallyQuantizableLinear" in problem.given


def test_every_style_of_the_library_is_one_of_ours_or_whole():
    """What plans of transformers say is translated to styles that a table takes."""
    for style in filter(None, _STYLES.values()):
        assert Table.of({}, sequence={"a": style}).sequence == (("a", style),)


def test_the_page_has_every_style():
    """Each style that a table takes has its row, each decoder its name; its model's table fits."""
    page = (HOW_TO / "tables.md").read_text()
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    (code,) = [text for text in blocks if "class" in text]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    model = names["Model"]().double()
    for ranks in range(1, 9):
        for sp in (False, True):
            assert check(table_of(model), shapes(model), sp, ranks) == []
    written = re.findall(r"`([a-z_]+(?::[a-z_]+|:2)?)`", page)
    assert {style.replace("colwise:N", "colwise:2") for style in STYLES} <= set(written)
    decoders = (HOW_TO / "hugging-face.md").read_text()
    assert all(kind in decoders for kind in _DECODERS)
