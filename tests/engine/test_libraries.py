"""Models of transformers in pipelines, adapters of peft, and torch.compile: the same training."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import assign
from shardwise.models import hf, user
from shardwise.techniques.tensor.source import shapes, table_of
from tests.engine import loops
from tests.engine.cases import difference, regression, settled
from tests.engine.zoo import Block, Stack
from tests.pool import run_gloo, run_threads
from tests.verify.test_command import shortly

# --- transformers ---------------------------------------------------------------------------------

#: What a type is for, where that is no causal language model.
FAMILIES = {"bert": "MaskedLM"} | dict.fromkeys(("t5", "bart"), "Seq2SeqLM")


def built(name: str) -> nn.Module:
    """A small model, whose blocks write to the cache that they are given."""
    transformers = pytest.importorskip("transformers")
    config = hf.small_config(name)
    config.update({"use_cache": True, "decoder_start_token_id": 0, "pad_token_id": 0})
    family = f"AutoModelFor{FAMILIES.get(name, 'CausalLM')}"
    return getattr(transformers, family).from_config(config)


def padded(which: str) -> dict[str, Tensor]:
    """Eight sequences; those of some microbatches have padding, or all, on the right or left."""
    ids = torch.randint(2, 32, (8, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in (5,) if which == "some" else range(8):
        mask[row, : row % 4 + 1] = int(which != "left")
        mask[row, 9 - row % 4 :] = int(which == "left")
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


def counted(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def hf_losses(world: World, name: str, which: str, plan: str) -> list[float]:
    """The losses of two steps, of a model on the meta device too."""
    torch.set_num_threads(1)
    with torch.device("meta" if which == "meta" else "cpu"):
        model = built(name).eval()
    model = model if which == "meta" else settled(model)
    engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=0.1), tokens=counted)
    return [engine.step(padded(which)).loss for _ in range(2)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("which", ["right", "left", "some"])
@pytest.mark.parametrize("name", ["llama", "gpt2", *FAMILIES])
def test_transformers_with_padding(name: str, which: str):
    """A stage looks at masks, in an encoder that is one layer too; blocks write to a cache."""
    plan = "pp2 1f1b:4 fp64" + " recompute:full" * (which == "left")
    expected = pytest.approx(hf_losses(alone(), name, which, "accumulate:4 fp64"), rel=1e-9)
    for found in run_threads(2, hf_losses, name, which, plan):
        assert found == expected


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_of_transformers_on_meta(name: str):
    """Its own initial weights, the same under stages as in one process."""
    expected = hf_losses(alone(), name, "meta", "accumulate:4")
    for found in run_gloo(2, hf_losses, name, "meta", "pp2 1f1b:4"):
        assert found == pytest.approx(expected, rel=1e-4)


# --- adapters of peft -----------------------------------------------------------------------------

LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted(name: str, **options: Any) -> Any:
    """A small model of transformers with adapters whose weights are not zero."""
    peft, transformers = (pytest.importorskip(library) for library in ("peft", "transformers"))
    model = transformers.AutoModelForCausalLM.from_config(hf.small_config(name))
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def text(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["tp2 sp", "dp2 zero3"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"target_modules": LAYERS, "lora_dropout": 0.1, "layers_to_transform": [1]}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}),
        ("qwen2", {"target_modules": ["o_proj", "lm_head", "embed_tokens"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
        ("gpt2", {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"]}),
    ],
    ids=["one layer", "some", "vocabulary", "gpt2", "head of gpt2"],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_adapters_train_as_on_one_process(name: str, options: dict[str, Any], plan: str):
    """Loss, gradients, weights, bytes and memory hold under tensor parallelism, sp and zero3."""
    made = user.of_function("adapted", lambda: (adapted(name, **options), loss_fn, text))
    found = shortly(f"{plan} fp64", made)
    assert found.holds, found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_table_names_the_layers_in_a_wrapped_layer():
    """W and B are sharded by columns, W and A by rows; a layer without adapters keeps its style."""
    model = adapted("llama", target_modules=LAYERS, layers_to_transform=[1])
    found = assign(table_of(model), list(shapes(model)), sp=False)
    styles = {name: str(style) for name, style in found.items()}
    layers = "base_model.model.model.layers"
    wanted = {
        "1.self_attn.q_proj.base_layer": "colwise:heads",
        "1.self_attn.q_proj.lora_B.default": "colwise:heads",
        "1.self_attn.q_proj.lora_A.default": None,
        "1.self_attn.o_proj.base_layer": "rowwise:heads",
        "1.self_attn.o_proj.lora_A.default": "rowwise:heads",
        "1.self_attn.k_proj": "colwise:kv_heads",
        "0.self_attn.q_proj": "colwise:heads",
    }
    assert {name: styles.get(f"{layers}.{name}") for name in wanted} == wanted
    with pytest.raises(InputError, match=r"use_dora=True.*use_dora=False"):  # norms of a whole
        table_of(adapted("llama", target_modules=["q_proj"], use_dora=True))


# --- torch.compile --------------------------------------------------------------------------------

#: Ways to compile: on the plain module, and on the wrapped one.
Change = Callable[[nn.Module, str], nn.Module]


class Model(Stack):
    """Three blocks, a buffer and a parameter of the model's own. Layers are large enough to be
    computed by nodes of ours where nothing compiles.
    """

    def __init__(self) -> None:
        super().__init__(*[Block(11000) for _ in range(3)])
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain + self.get_buffer("shift"))


def model() -> nn.Module:
    return settled(Model()).double()


def kept(module: nn.Module, backend: str) -> nn.Module:
    return module


def outer(module: nn.Module, backend: str) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[return-value]


def inner(module: nn.Module, backend: str) -> nn.Module:
    module.compile(backend=backend)
    return module


def blocks(module: nn.Module, backend: str) -> nn.Module:
    found = module.get_submodule("blocks")
    for name, block in list(found.named_children()):
        setattr(found, name, torch.compile(block, backend=backend))
    return module


def blocks_inner(module: nn.Module, backend: str) -> nn.Module:
    for block in module.get_submodule("blocks").children():
        block.compile(backend=backend)
    return module


WHENS: dict[str, tuple[Change, Change]] = {
    "model before": (outer, kept),
    "model.compile() before": (inner, kept),
    "model after": (kept, outer),
    "blocks before": (blocks, kept),
    "block.compile() before": (blocks_inner, kept),
    "blocks after": (kept, blocks),
}


def started() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def graphs() -> tuple[int, int]:
    """Graphs that were made, and how often a frame was broken into several."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


SHARED = ("tp2", "pp2 gpipe:2", "sw.Pipe", "sw.DataParallel")  # whose ranks have the same rows
SKIPPING = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")
TABLE = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def in_engine(module: nn.Module, after: Change, world: World, how: str, x: Tensor) -> sw.Engine:
    options: dict[str, Any] = {"table": TABLE} if how == "tp2" else {}
    loss = torch.compile(regression, backend="eager") if how in SHARED else regression
    engine = sw.parallelize(
        module, f"{how} fp64", world, optimizer=sw.SGD(lr=0.05), loss=loss, clip=0.1, **options
    )
    after(engine.model, "eager")
    for _ in range(2):
        engine.step((x, x.cos()))
    return engine


def wrapped(world: World, how: str, module: nn.Module) -> nn.Module:
    if how == "sw.DataParallel":
        return sw.DataParallel(module, ["cpu", "cpu"])
    if how == "sw.Pipe":
        return sw.Pipe(module, 2, world=world)
    if how == "DDP":
        return sw.DDP(module, world)
    return sw.FSDP(module, how, units=Block, world=world)


def compiled(world: World, how: str, when: str, backend: str) -> tuple[dict[str, Tensor], Any]:
    """Two steps with what a loop calls: no_sync, clipping, unwrap; and the graphs of them. The
    weights have the names of the checkpoint, after `sw.unwrap` too.
    """
    started()
    before, after = WHENS[when]
    module, x = before(model(), backend), torch.cat([loops.rows(0, rank) for rank in range(2)])
    own = x if how in SHARED else loops.rows(0, world.rank)
    if " " in how or how == "tp2":
        engine = in_engine(module, after, world, how, own)
        return sw.full_state_dict(engine), graphs()
    module = wrapped(world, how, module)
    module = after(module, backend) if "blocks" not in when or how != "sw.DataParallel" else module
    optim = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(2):
        with sw.no_sync(module) if how in SKIPPING else nullcontext():
            (regression(module, (own, own.cos())) * 0).backward()
        regression(module, (own, own.cos())).backward()
        if how in SKIPPING:
            with torch.no_grad():  # another graph, while there are gradients
                regression(module, (own, own.cos()))
        sw.clip_grad_norm(module, 0.1)
        optim.step()
        optim.zero_grad()
    state = {} if how == "sw.DataParallel" else sw.full_state_dict(module)
    plain = sw.unwrap(module).state_dict()
    plain = {name.replace("_orig_mod.", ""): value for name, value in plain.items()}
    assert all(torch.equal(state[name], plain[name]) for name in state)
    return plain, graphs()


COMPILED = [
    *(("FULL_SHARD", when, "eager") for when in WHENS),
    ("SHARD_GRAD_OP", "block.compile() before", "aot_eager"),
    *(("DDP", when, "eager") for when in ("model before", "blocks after")),
    *((how, when, "eager") for how in SHARED for when in list(WHENS)[:2]),
    *(("sw.DataParallel", when, "eager") for when in list(WHENS)[2:]),
    *(("dp2 zero3", when, "eager") for when in ("model.compile() before", "blocks before")),
    ("dp2 ddp accumulate:2", "block.compile() before", "eager"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("how", "when", "backend"), COMPILED)
def test_compiled_models_train_as_plain_ones(how: str, when: str, backend: str):
    """Compiled before or after; blocks share a graph, which breaks only where a unit begins."""
    alone, x = model(), torch.cat([loops.rows(0, rank) for rank in range(2)])
    optim = torch.optim.SGD(alone.parameters(), lr=0.05)
    for _ in loops.steps(optim, 2):
        regression(alone, (x, x.cos())).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    expected = alone.state_dict()
    state, (made, breaks) = run_gloo(1 + (how != "sw.DataParallel"), compiled, how, when, backend)[
        0
    ]
    assert list(state) == list(expected)
    assert all(difference(state[name], expected[name]) <= 1e-8 for name in expected)
    assert how in SHARED or made >= 1
    if how in SKIPPING:
        assert made <= 8
        assert breaks == 0 if "block" in when else breaks <= 5
