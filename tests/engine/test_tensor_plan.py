"""Where tables come from, and what shapes they give a rank."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import STYLES, Table, assign, cuts
from shardwise.models import hf
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.techniques.tensor.hf_tables import _DECODERS, _STYLES
from shardwise.techniques.tensor.source import shapes, table_of
from shardwise.techniques.tensor.table_check import check

transformers = pytest.importorskip("transformers")

NAMES = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "mixtral"]
CONFIG = GPTConfig(
    vocabulary=37, layers=2, hidden_size=48, heads=6, kv_heads=2, intermediate_size=50, sequence=8
)


def made(name: str, **changes: Any) -> Any:
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


# --- the page ----------------------------------------------------------------------------------

HOW_TO = Path(__file__).parents[2] / "docs/how-to"


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
