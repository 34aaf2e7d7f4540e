"""Tables that are derived hold, send no more than those that are shipped, and say what is whole."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import Table, matches
from shardwise.core.plan.plan import Plan
from shardwise.derive.table import Derived, derive_table
from shardwise.engine.predict import predict
from shardwise.models.registry import find
from shardwise.techniques.tensor.source import own_table
from shardwise.train import config
from shardwise.train.prepare import RunStart, prepare
from shardwise.verify.inputs import Options, table_in
from tests.derive import models
from tests.train.runs import model_folder, pretrained, printed, run
from tests.verify.test_command import shortly

HAND = Path(__file__).with_name("models.py")
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
@pytest.mark.parametrize("kind", TYPES)
def test_the_table_of_an_architecture_holds_and_sends_no_more_than_its_own(kind: str):
    """Of models of transformers; those with a plan of the library's or ours are compared."""
    pytest.importorskip("transformers")
    found, trainable = derived(f"toy:{kind}"), find(f"toy:{kind}")
    model = trainable.build()
    own = own_table(model)
    if own is not None:
        shipped = predict(model, "tp2", trainable.batch(2, 0), loss=trainable.loss, table=own)
        assert found.sent_bytes <= sum(n for line, n in shipped.sent().items() if line.axis == "tp")
    if kind in SEQUENCE:
        of_shards = derived(f"toy:{kind}", sp=True).table
        assert found.table.styles == of_shards.styles
        assert holds(f"toy:{kind}", "tp2 sp", of_shards)
    else:
        assert holds(f"toy:{kind}", "tp2", found.table)


@pytest.mark.full
def test_the_table_of_the_gpt_is_as_good_as_our_own():
    """It sends the same bytes, and shards all weights but those of norms."""
    trainable = find("gpt")
    model, batch = trainable.build(), trainable.batch(2, 0)
    found = derive_table(model, batch, 2, trainable.loss)
    own = predict(model, "tp2", batch, loss=trainable.loss, table=own_table(model))
    assert found.sent_bytes == sum(n for line, n in own.sent().items() if line.axis == "tp")
    assert {each.name for each in found.whole} == {
        *("blocks.*.attn_norm", "blocks.*.mlp_norm", "norm")
    }


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
