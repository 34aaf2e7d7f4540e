"""Adapters of peft beside sharded layers: each layer of an adapter gets the style that fits."""

from functools import partial
from typing import Any

import pytest
import torch

from shardwise.core.errors import InputError
from shardwise.models import hf, user
from shardwise.techniques.tensor.source import shapes, table_of
from shardwise.techniques.tensor.tensor_table import assign
from tests.verify.test_command import shortly

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
POSITIONS = 8


def adapted(name: str, **options: Any) -> Any:
    """A small model of transformers with adapters whose weights are not zero."""
    model = transformers.AutoModelForCausalLM.from_config(hf.small_config(name))
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over all predicted tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def text(rows: int, seed: int) -> torch.Tensor:
    """Random tokens [rows, positions]."""
    return torch.randint(32, (rows, POSITIONS), generator=torch.Generator().manual_seed(seed))


def build(name: str, options: dict[str, Any]) -> Any:
    return adapted(name, **options), loss_fn, text


@pytest.mark.cases(2)
@pytest.mark.parametrize("plan", ["tp2", "tp2 sp", "dp2 zero3"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"target_modules": LAYERS, "lora_dropout": 0.1}),
        ("llama", {"target_modules": LAYERS, "layers_to_transform": [1]}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}),
        ("qwen2", {"target_modules": ["o_proj", "lm_head", "embed_tokens"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
        ("gpt2", {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"]}),
    ],
    ids=["dropout", "one layer", "some", "vocabulary", "gpt2", "head of gpt2"],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_adapters_train_as_on_one_process(name: str, options: dict[str, Any], plan: str) -> None:
    """Loss, gradients, weights, bytes and memory hold under tensor parallelism, sp and zero3."""
    found = shortly(f"{plan} fp64", user.of_function("adapted", partial(build, name, options)))
    assert found.holds, found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_table_names_the_layers_in_a_wrapped_layer() -> None:
    """W and B are sharded by columns, W and A by rows; a layer without adapters keeps its style."""
    model = adapted("llama", target_modules=LAYERS, layers_to_transform=[1])
    found = assign(table_of(model), list(shapes(model)), sp=False)
    styles = {name: str(style) for name, style in found.items()}
    layer = "base_model.model.model.layers.1.self_attn"
    assert styles[f"{layer}.q_proj.base_layer"] == "colwise:heads"
    assert styles[f"{layer}.q_proj.lora_B.default"] == "colwise:heads"
    assert styles[f"{layer}.o_proj.base_layer"] == "rowwise:heads"
    assert styles[f"{layer}.o_proj.lora_A.default"] == "rowwise:heads"
    assert f"{layer}.q_proj.lora_A.default" not in styles
    assert styles[f"{layer}.k_proj"] == "colwise:kv_heads"
    assert styles["base_model.model.model.layers.0.self_attn.q_proj"] == "colwise:heads"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_cannot_be_sharded_are_refused() -> None:
    """Norms of a whole weight."""
    with pytest.raises(InputError, match=r"use_dora=True.*use_dora=False"):
        table_of(adapted("llama", target_modules=["q_proj"], use_dora=True))
