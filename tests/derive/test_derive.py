"""Tables that are derived hold, send no more than those that are shipped, and say what is whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cli.main import main
from shardwise.derive.table import Derived, derive_table
from shardwise.engine.predict import predict
from shardwise.models.registry import find
from shardwise.techniques.tensor.source import own_table
from shardwise.techniques.tensor.tensor_table import matches
from shardwise.verify.proof_options import Options, table_in
from shardwise.verify.report import Report
from tests.verify.test_command import shortly

HAND = Path(__file__).with_name("models.py")
MODELS = ["convolution", "recurrent", "encoder_decoder", "packed", "tied"]
TYPES = [
    *("gpt2", "bloom", "bert", "t5", "llama", "mistral", "qwen3", "gemma2", "phi3", "opt"),
    "gpt_neox",
]
#: Those that tests/derive/test_sequence.py proves under sp, with the same styles.
SEQUENCE = ["gpt2", "bert", "llama", "mistral", "qwen3", "gemma2", "gpt_neox"]
#: Modules that are sharded of each: every pair of layers, and the vocabulary.
MODULES = {
    "convolution": "embed, body.after.up, body.after.down, head",
    "recurrent": "embed, body.after.up, body.after.down, head",
    "packed": "embed, body.0.inner.qkv, body.0.inner.out, body.1.up, body.1.down, head",
    "tied": "embed, body.up, body.down, head",
}


def derived(name: str, ranks: int = 2, *, sp: bool = False) -> Derived:
    found = find(name)
    return derive_table(found.build(), found.batch(2, 0), ranks, found.loss, sp=sp)


def proved(name: str, table: sw.Table, ranks: int = 2) -> Report:
    return shortly(f"tp{ranks} fp64", name, Options(table=table))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_a_model_written_by_hand_holds(name: str):
    """Parity, bytes and memory; and every layer that can be sharded is."""
    found = derived(f"{HAND}:{name}")
    assert proved(f"{HAND}:{name}", found.table).holds
    if name in MODULES:
        modules = [module for module, _ in find(f"{HAND}:{name}").build().named_modules()]
        assert {*matches(found.table, modules, sp=False)} == {*MODULES[name].split(", ")}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gpt2", "t5", "llama") else pytest.param(kind, marks=pytest.mark.full)
        for kind in TYPES
    ],
)
def test_the_table_of_an_architecture_holds_and_sends_no_more_than_its_own(kind: str):
    """Of models of transformers; those with a plan of the library's or ours are compared."""
    pytest.importorskip("transformers")
    found = derived(f"hf:{kind}")
    trainable = find(f"hf:{kind}")
    model = trainable.build()
    own = own_table(model)
    if own is not None:
        shipped = predict(model, "tp2", trainable.batch(2, 0), loss=trainable.loss, table=own)
        assert found.sent_bytes <= sum(n for line, n in shipped.sent().items() if line.axis == "tp")
    if kind in SEQUENCE:
        assert found.table.styles == derived(f"hf:{kind}", sp=True).table.styles
    else:
        assert proved(f"hf:{kind}", found.table).holds


@pytest.mark.full
def test_the_table_of_the_gpt_is_as_good_as_our_own():
    """It shards the same weights, and sends the same bytes."""
    trainable = find("gpt")
    model, batch = trainable.build(), trainable.batch(2, 0)
    found = derive_table(model, batch, 2, trainable.loss)
    own = predict(model, "tp2", batch, loss=trainable.loss, table=own_table(model))
    assert found.sent_bytes == sum(n for line, n in own.sent().items() if line.axis == "tp")
    whole = {name for name, _ in model.named_parameters() if "norm" in name}
    assert {each.name for each in found.whole} == {
        re.sub(r"\d+", "*", name.removesuffix(".weight")) for name in whole
    }


@pytest.mark.full
def test_layers_in_a_row_are_paired():
    """Of five in a row two pairs are sharded; what is left over is named with its bytes."""
    name = f"{HAND}:chain"
    found = derived(name)
    assert [style for _, style in found.table.styles].count("colwise") == 2
    (left,) = [each for each in found.whole if each.bytes > 100]
    assert left.bytes == 4 * (12 * 12 + 12)
    assert proved(name, found.table).holds


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layer", "why"),
    [
        ("one_key", "body.inner.q", "a replicated tensor is combined with it"),
        ("scaled", "body.inner.up", "a replicated tensor is combined with it"),
        ("shifted", "body.*.inner.up", "a constant or the batch has its size"),
        ("convolution", "body.mix", "no layer of features in and out"),
    ],
)
def test_what_is_not_understood_stays_whole(name: str, layer: str, why: str):
    """It is named with the reason, and the rest of the table holds."""
    found = derived(f"{HAND}:{name}")
    assert why in {each.name: each.why for each in found.whole}[layer]
    assert proved(f"{HAND}:{name}", found.table).holds


@pytest.mark.full
def test_heads_that_ranks_do_not_divide():
    """Three ranks and four heads: the table counts heads, and attributes with them."""
    name = f"{HAND}:encoder_decoder"
    found = derived(name, 3)
    assert found.table.heads == 4
    assert found.table.sets
    assert proved(name, found.table, 3).holds


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


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as end:
        main(argv)
    return int(end.value.code or 0), capsys.readouterr()


@pytest.mark.full
def test_the_command_prints_a_table_to_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What it prints is a file for --table."""
    code, printed = run(capsys, "table", f"{HAND}:encoder_decoder")
    (tmp_path / "table.toml").write_text(printed.out)
    assert code == 0
    assert table_in(tmp_path / "table.toml") == derived(f"{HAND}:encoder_decoder").table
    assert "bytes stay whole on every rank:" in printed.out
    code, printed = run(capsys, "table", "gpt", "--tp", "1")
    assert (code, printed.err.count("\n")) == (2, 1)


@pytest.mark.full
def test_verify_derives_the_table_of_a_model_without_one(capsys: pytest.CaptureFixture[str]):
    """`verify tp2` needs no table."""
    assert run(capsys, "verify", "tp2", "--model", f"{HAND}:tied")[0] == 0
