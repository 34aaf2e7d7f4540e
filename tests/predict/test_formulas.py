"""What a rank holds, keeps and sends, and what `recompute:SIZE` chooses: by formulas, measured."""

import itertools
import random
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.buffer_sizes import pool_bytes
from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import even, heads
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.words import size_text
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import EVEN, predict
from shardwise.models import gpt
from shardwise.models.gpt import random_text
from shardwise.models.moe import loss as moe_loss
from shardwise.models.registry import find
from shardwise.models.trainable import fill
from shardwise.observe.dry_engine import DryRun
from shardwise.observe.dry_twin import predict_events
from shardwise.observe.meter import Meter
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.recompute.apply import KEPT, Foreseen, Recomputation
from shardwise.verify.oracles.batches import Loads
from shardwise.verify.oracles.textbook import Uses, exchanged
from tests.engine.cases import small_gpt
from tests.expert import moe
from tests.pool import run_threads

# --- activations ----------------------------------------------------------------------------------

# With recomputation: arXiv 2205.05198 section 5; docs/explanation/memory.md derives all of it. No
# term grows with T squared: torch's attention kernel recomputes the scores. The column inputs are
# complete under sp too: they are gathered once, in forward, and kept for the weight gradients; the
# paper keeps a shard of each and gathers it again.

WIDE_BYTES = 4  # norms and log-sum-exps are computed in fp32 or wider


@dataclass(frozen=True)
class BlockShape:
    """A Block of models/gpt.py as numbers; see there for the names."""

    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int


def block_bytes(
    block: BlockShape,
    tokens: tuple[int, int],
    element_bytes: int,
    ranks: int = 1,
    sp: bool = False,
    rank: int = 0,
    recompute: str = "none",
) -> int:
    """Bytes that one Block holds on `rank` of `ranks` between its forward and its backward.
    `tokens` are B sequences of T positions; `recompute` is "none", "selective", "full" or
    "partitioned". Counts the storages that autograd keeps alive on a CPU, each once: the block's
    input, not its output. Raises ValueError if the heads cannot be shared.
    """
    batch, positions = tokens
    wide = max(element_bytes, WIDE_BYTES)
    shard = -(-positions // ranks) if sp else positions  # padded where they do not divide
    queries, keys = (cut.size(rank) for cut in heads(block.heads, block.kv_heads, ranks))
    features = even(0, block.intermediate_size, ranks).size(rank)
    head_width = block.hidden_size // block.heads
    stream = shard * block.hidden_size * element_bytes
    attention = 2 * (queries + keys) * head_width * element_bytes + queries * wide
    if recompute == "full" or (recompute == "partitioned" and sp):
        return batch * stream
    if recompute == "partitioned":
        return -(-batch * positions * block.hidden_size // ranks) * element_bytes
    if recompute == "selective":
        summed_in_place = ranks > 1 and not sp
        products = 2 * (features + (0 if summed_in_place else block.hidden_size)) * element_bytes
        return batch * (stream + positions * (attention + products))
    norms = 2 * shard * (2 * block.hidden_size + 1) * wide
    inputs = 2 * block.hidden_size * element_bytes
    forward = 4 * features * element_bytes
    return batch * (norms + positions * (inputs + attention + forward))


BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
#: Sizes that divide by 2 and 4, with grouped heads; and sizes that do not, with shared key heads.
BLOCKS = {
    "round": BlockShape(hidden_size=64, heads=8, kv_heads=4, intermediate_size=96),
    "uneven": BlockShape(hidden_size=60, heads=6, kv_heads=3, intermediate_size=50),
    "shared": BlockShape(hidden_size=32, heads=4, kv_heads=1, intermediate_size=37),
    "wide": BlockShape(hidden_size=256, heads=4, kv_heads=4, intermediate_size=64),
}
TOKENS = {"round": (3, 8), "wide": (8, 64)}


def live(world: World, plan: str, block: BlockShape, tokens: tuple[int, int]) -> list[int]:
    """Live bytes of activations after a forward pass through two, three and four blocks."""
    found: list[int] = []
    for layers in (2, 3, 4):
        config = gpt.GPTConfig(vocabulary=61, layers=layers, sequence=tokens[1], **vars(block))
        model = gpt.GPT(config)
        fill(model, 0)
        engine = sw.parallelize(model, plan, world, loss=gpt.loss, tokens=gpt.tokens)
        meter = Meter(engine)
        with meter:
            logits = engine.model(random_text(*tokens, 61, 0)["inputs"])
        held = sum(n for place, n in meter.now().items() if place.category == "activations")
        assert logits.requires_grad
        found.append(held)
    return found


PLANS = [
    *zip(itertools.cycle(BLOCKS), BYTES, strict=False),
    *(("round", "tp2 fp64"), ("uneven", "tp2 sp bf16"), ("shared", "tp4 sp fp32")),
    *(("uneven", f"tp2 bf16 recompute:{how}") for how in ("full", "selective", "partitioned")),
    *(("uneven", f"tp4 sp fp32 recompute:{how}") for how in ("full", "selective", "partitioned")),
    *(("wide", "fp64 recompute:selective"), ("uneven", "tp4 fp32 recompute:partitioned")),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("shape", "plan"), PLANS)
def test_live_bytes_equal_the_formula(shape: str, plan: str):
    """Each further block adds its formula's bytes on every rank, exactly, recomputed or not."""
    block, tokens, words = BLOCKS[shape], TOKENS.get(shape, (3, 9)), plan.split()
    ranks = int(plan[2]) if plan.startswith("tp") else 1
    size = next(BYTES[word] for word in words if word in BYTES)
    again = next((w[10:] for w in words if w.startswith("recompute:")), "none")
    for rank, (two, three, four) in enumerate(run_threads(ranks, live, plan, block, tokens)):
        formula = block_bytes(block, tokens, size, ranks, "sp" in words, rank, again)
        assert (three - two, four - two) == (formula, 2 * formula)


#: Bytes that autograd kept on an H100 (torch 2.11) when blocks 1, 2 and 3 began: gpt in fp16, as
#: `shardwise verify "dp1 fp16" --device cuda` read them for two rows of 63 tokens.
H100 = [619_936, 1_235_840, 1_851_744]


def test_what_the_kernels_of_a_gpu_keep():
    """It is predicted to the byte, without a GPU."""
    model = find("gpt")
    options = EngineOptions(loss=gpt.loss, kernels="cuda", least_unit_bytes=0)
    batch = {name: x[:, :63] for name, x in model.batch(2, 0).items()}
    _, events = predict_events(model.plain(), "dp1 fp16", batch, options)
    blocks = [f"forward blocks.{n}" for n in (1, 2, 3)]
    assert [e.by_category["kept"] for e in events if str(e) in blocks] == H100


# --- states and buffers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "model_bytes", "expected"),
    [
        ("dp4 zero3", 2**40, 16 * 2**20),
        ("dp1024 zero3", 2**40, 16 * 2**20),
        ("dp2 bucket:1MiB", 2**30, 2**24),
        ("dp2 tp2", 10_000, 10_240),  # of a small model as much as it has
        ("dp2 buffers:64MiB", 10_000, 2**26),
        ("dp2", 4, 1536),
        ("zero3 buffers:64MiB", 2**40, 0),
    ],
)
def test_communication_buffers_are_the_plans(text: str, model_bytes: int, expected: int):
    """A pool is no larger for a larger model or world; a single rank, and NCCL, have none."""
    plan = Plan.parse(text)
    assert pool_bytes(plan, model_bytes, "cpu") == expected
    asked = 0 if plan.size == 1 or plan.buffers_bytes is None else expected
    assert pool_bytes(plan, model_bytes, "cuda") == asked


# --- tokens of experts ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_an_even_load_is_assumed(name: str):
    """Without values, and a note says so."""
    model, rows = moe.model(name, 1.25).to("meta"), moe.batch(name, 2, 0)
    assert not predict(model, "dp2 zero3", rows, loss=moe_loss).notes
    found = predict(model, "dp4 ep2 zero3", rows, loss=moe_loss, rank=3)
    assert found.notes == (EVEN,) and found.activations > 0


def test_tokens_that_stay_on_their_rank_send_nothing():
    """Those that leave send their row and get one, and both again backward; an even load half."""
    rows, options = moe.batch("topk", 2, 0), EngineOptions(loss=moe_loss)
    plan = Plan.parse("dp2 ep2").completed(None)
    engine = DryRun(moe.model("topk"), plan, options, 0).engine
    found, tokens = predict(moe.model("topk"), plan, rows, loss=moe_loss), rows["inputs"].numel()
    own, other = (tokens, tokens, 0, 0), (0, 0, tokens, tokens)
    uses = Uses(moe.model("topk"))

    def sent_with(*choices: tuple[int, ...]) -> int:
        loads = Loads(dict.fromkeys(layers_of(moe.model("topk")), choices))
        return exchanged(engine, uses, (loads,), trains=True)

    assert sent_with(own, other) == 0
    assert sent_with(other, own) == 2 * found.bytes["ep all_to_all"]


# --- predictions of any model ---------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["topk", "expert-choice"])
def test_a_prediction_stores_little_for_each_rank(name: str):
    """Of two thousand ranks the numbers that all of them gather."""
    model, rows = moe.model(name).to("meta"), moe.batch(name, 2, 0)
    found = predict(model, "dp2048 ep2 zero3", rows, loss=moe_loss)
    tracemalloc.start()
    assert found.bytes and found.memory
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**23


class Choosing(nn.Module):
    """Reads a value to decide which of its layers it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


class Recurrent(nn.Module):
    """An LSTM, whose weights have weak references, and which compares devices by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, None])[0][:, 0]


def test_what_depends_on_values_is_said():
    """A model that reads values is run on the batch itself, and the prediction has a note."""
    options: dict[str, Any] = {"loss": lambda model, x: model(x).square().mean()}
    for model, why in ((Choosing(), "item()"), (Recurrent(), "torch.lstm")):
        (note,) = predict(model, "dp2 zero3", torch.ones(2, 4), **options).notes
        assert "run on the CPU with its batch" in note and why in note, note
    assert predict(Recurrent(), "pp2 1f1b:2", torch.ones(2, 4), **options).bytes
    assert not predict(Recurrent().to("meta"), "dp2 zero3", torch.ones(2, 4), **options).notes
    with pytest.raises(InputError, match="on the meta device whose forward reads values"):
        predict(Choosing().to("meta"), "dp2 zero3", torch.ones(2, 4), **options)
    with pytest.raises(InputError, match=r"rank=1\. Allowed: a whole number from 0 to 0"):
        predict(Choosing(), "dp1", torch.ones(2, 4), rank=1, **options)


def test_the_model_stays_as_it_is():
    """Neither hooks nor gradients nor other types are left on it."""
    model = small_gpt()
    before = {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    rows = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("inputs", "targets")}
    predict(model, "dp2 zero3 bf16", rows, loss=gpt.loss, optimizer=sw.AdamW(lr=1e-3))
    assert before == {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- recompute:SIZE -------------------------------------------------------------------------------

LAYERS = 4


def made() -> gpt.GPT:
    sizes = vars(BLOCKS["round"])
    model = gpt.GPT(gpt.GPTConfig(vocabulary=61, layers=LAYERS, sequence=16, **sizes))
    fill(model, 0)
    return model


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    """Text whose tensors own their memory."""
    return {name: x.clone() for name, x in random_text(rows, 16, 61, 0).items()}


def predicted(plan: str, rank: int = 0, rows: int = 3) -> Any:
    return sw.predict(made(), plan, batch(rows), loss=gpt.loss, rank=rank)


def kept_alive(world: World, plan: str) -> tuple[int, dict[str, str]]:
    """Live bytes of activations after a forward pass that follows a step, and what was chosen."""
    engine = sw.parallelize(made(), plan, world, loss=gpt.loss, tokens=gpt.tokens)
    engine.step(batch())
    meter = Meter(engine)
    with meter:
        text = batch()
        loss = gpt.loss(engine.model, text)
    live = sum(n for place, n in meter.now().items() if place.category == "activations")
    beside = loss.nbytes + sum(x.nbytes for x in text.values())
    return live - beside, dict(engine.recompute.kinds)


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
def test_a_budget_is_met_and_used(share: float):
    """The activations live after a forward are those predicted: the budget, less those of a block
    at most. Those that backward comes to last are recomputed.
    """
    least, most = (predicted(plan).activations for plan in ("fp64 recompute:full", "fp64"))
    budget = round(least + share * (most - least))
    plan = f"fp64 recompute:{size_text(budget)}"
    ((kept, kinds),) = run_threads(1, kept_alive, plan)
    found = predicted(plan)
    assert kept == found.activations
    assert kinds == found.recomputed
    assert 0 <= budget - kept < (most - least) / LAYERS
    order = ["full", "selective", "none"]
    indices = [order.index(kinds.get(f"blocks.{k}", "none")) for k in range(LAYERS)]
    assert indices == sorted(indices)


@pytest.mark.parametrize("schedule", ["1f1b:4", "zb-v:4", "interleaved:4x2"])
def test_a_budget_of_each_rank_of_a_pipeline(schedule: str):
    """Every rank keeps its budget with all its microbatches under way, and recomputes no more than
    it must: some blocks only if all do not fit, and some in full only if selective does not.
    """
    budget = 1000 * 2**10
    plan, less = f"pp2 {schedule} fp64", {"full": " recompute:selective", "selective": ""}
    for rank in range(2):
        found = predicted(f"{plan} recompute:{size_text(budget)}", rank, 8)
        assert found.activations <= budget
        for kind in {*found.recomputed.values()}:
            assert predicted(f"{plan}{less[kind]}", rank, 8).activations > budget


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query
    return sdpa_flop_count(query, (batch, heads, rows, width), (batch, heads, rows, value[-1]))


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def counted(plan: str) -> int:
    """The operations of a second step."""
    engine = sw.parallelize(made(), plan, alone(), loss=gpt.loss, tokens=gpt.tokens)
    engine.step(batch())
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        engine.step(batch())
    return counter.get_total_flops()


@pytest.mark.parametrize("what", ["full", "1MiB", "selective", "every3", "blocks.*.attn"])
def test_operations_that_are_added(what: str):
    """Those predicted are those counted."""
    plan = f"fp64 recompute:{what}"
    assert counted(plan) - counted("fp64") == predicted(plan).recomputed_flops


def test_operations_of_microbatches():
    """Each microbatch of a step adds its own."""
    one, two = (predicted(f"recompute:full accumulate:{n}", rows=4) for n in (1, 2))
    assert one.recomputed_flops == two.recomputed_flops > 0


@pytest.mark.full
def test_a_budget_that_cannot_be_met():
    """It is refused with the smallest that can, before a step has begun."""
    least = predicted("fp64 recompute:full").activations
    with pytest.raises(InputError, match=f"Write instead: recompute:{size_text(least)}") as caught:
        predicted(f"fp64 recompute:{size_text(least - 1)}")
    assert f"at least {least:,} bytes" in str(caught.value)
    assert predicted(f"fp64 recompute:{size_text(least)}").activations == least
    engine = sw.parallelize(made(), "recompute:1KiB", alone(), loss=gpt.loss, tokens=gpt.tokens)
    with pytest.raises(InputError, match="Write instead: recompute:"):
        engine.step(batch())
    assert not engine.data.in_step


def test_lengths_without_end_cost_a_bounded_number_of_predictions():
    """The first shapes have one each; later ones get that of the next larger, if it is near."""
    asked: list[int] = []

    def choose(text: torch.Tensor) -> Foreseen:
        asked.append(len(text))
        return Foreseen({"block": str(len(text))}, {})

    recomputation = Recomputation({}, choose)

    def begun(length: int) -> str:
        recomputation.begin(torch.zeros(length), (), trains=True)
        assert len(recomputation.known) <= KEPT
        return recomputation.kinds["block"]

    lengths = range(8, 8 * (KEPT + 1), 8)
    assert [begun(n) for n in lengths] == [*map(str, lengths)] and asked == [*lengths]
    for length in random.Random(0).choices(range(8, lengths[-1]), k=500):
        assert begun(length) == str(-(-length // 8) * 8)
    assert asked == [*lengths]
    assert begun(1) == "1" and begun(1000) == "1000" and begun(999) == "1000"
    assert asked == [*lengths, 1, 1000]
