"""The bytes of activations that a layer holds are the formula's: published, and measured here."""

import itertools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import predict, predict_with
from shardwise.models import gpt
from shardwise.models.gpt import random_text
from shardwise.models.initial import fill
from shardwise.models.registry import find
from shardwise.observe.measured_timeline import marks_on
from shardwise.observe.meter import Meter
from tests.pool import run_threads
from tests.predict.block_activations import (
    BlockShape,
    PaperLayer,
    block_bytes,
    first_stage_layers,
    paper_bytes,
)

GIB = 2**30
BIG_22B = PaperLayer(sequence=2048, batch=4, width=6144, heads=64)
BIG_175B = PaperLayer(sequence=2048, batch=1, width=12288, heads=96)

# arXiv 2205.05198: model, layers, (stages, chunks), GiB on the first stage under tp, and under
# tp and sp with selective recomputation; t = 8
PUBLISHED = [(BIG_22B, 48, (1, 1), 59.25, 9.5625), (BIG_175B, 96, (8, 3), 66.84375, 12.3515625)]


@pytest.mark.parametrize(("layer", "layers", "stages", "tp", "sp"), PUBLISHED)
def test_the_papers_models(
    layer: PaperLayer, layers: int, stages: tuple[int, int], tp: float, sp: float
):
    """The published GiB of the 22B and the 175B model are met to the last digit."""
    held = first_stage_layers(layers, *stages)
    assert held * paper_bytes(layer, 8) / GIB == pytest.approx(tp, rel=1e-14)
    assert held * paper_bytes(layer, 8, True, "selective") / GIB == pytest.approx(sp, rel=1e-14)


# (t, sp, recompute), and the factor of s b h that stands in table 2, with 5 a s / h = 5
TABLE_2 = [
    (1, False, "none", 34 + 5),
    (4, False, "none", 10 + 24 / 4 + 5 / 4),
    (4, True, "none", 34 / 4 + 5 / 4),
    (4, False, "selective", 10 + 24 / 4),
    (4, True, "selective", 34 / 4),
    (4, True, "full", 2),
]


@pytest.mark.parametrize(("ranks", "sp", "recompute", "factor"), TABLE_2)
def test_the_papers_table(ranks: int, sp: bool, recompute: str, factor: float):
    """Every row of table 2, for a layer whose heads times positions are its width."""
    layer = PaperLayer(sequence=128, batch=3, width=1024, heads=8)
    assert paper_bytes(layer, ranks, sp, recompute) == 128 * 3 * 1024 * factor


def test_an_unknown_recomputation_is_refused():
    """Another word is answered with those that there are."""
    with pytest.raises(InputError, match="none, selective or full"):
        paper_bytes(BIG_22B, recompute="some")


BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
#: Sizes that divide by 2 and 4, with grouped heads; and sizes that do not, with shared key heads.
ROUND = BlockShape(width=64, heads=8, kv_heads=4, hidden=96)
UNEVEN = BlockShape(width=60, heads=6, kv_heads=3, hidden=50)
SHARED = BlockShape(width=32, heads=4, kv_heads=1, hidden=37)
WIDE = BlockShape(width=256, heads=4, kv_heads=4, hidden=64)
BLOCKS = {"round": ROUND, "uneven": UNEVEN, "shared": SHARED, "wide": WIDE}
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


def check(found: list[list[int]], plan: str, block: BlockShape, tokens: tuple[int, int]) -> None:
    words = plan.split()
    for rank, (two, three, four) in enumerate(found):
        size = next(BYTES[word] for word in words if word in BYTES)
        again = next((w[10:] for w in words if w.startswith("recompute:")), "none")
        formula = block_bytes(block, tokens, size, len(found), "sp" in words, rank, again)
        assert (three - two, four - two) == (formula, 2 * formula)


PLANS = [
    *BYTES,
    *("tp2 fp64", "tp2 bf16", "tp2 sp fp64", "tp2 sp bf16"),
    *("tp4 fp32", "tp4 sp fp32", "tp4 sp fp16"),
]


@pytest.mark.parametrize(("shape", "plan"), [*zip(itertools.cycle(BLOCKS), PLANS, strict=False)])
def test_live_bytes_equal_the_formula(shape: str, plan: str):
    """Each further block adds its formula's bytes on every rank, exactly, with and without sp."""
    ranks = int(plan[2]) if plan.startswith("tp") else 1
    block, tokens = BLOCKS[shape], TOKENS.get(shape, (3, 9))
    check(run_threads(ranks, live, plan, block, tokens), plan, block, tokens)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize(
    ("shape", "plan"), [("uneven", "tp2 bf16"), ("uneven", "tp4 sp fp32"), ("wide", "fp64")]
)
def test_live_bytes_with_recomputation(shape: str, how: str, plan: str):
    """A recomputed block adds its input, and selectively what its products gave, to the byte."""
    plan = f"{plan} recompute:{how}"
    ranks = int(plan[2]) if plan.startswith("tp") else 1
    block, tokens = BLOCKS[shape], TOKENS.get(shape, (3, 9))
    check(run_threads(ranks, live, plan, block, tokens), plan, block, tokens)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp2 bf16", "tp4 fp32", "tp2 sp fp64"])
def test_live_bytes_of_parts(plan: str):
    """A partitioned block adds its rank's part of the input, padded; under sp its shard."""
    plan, ranks = f"{plan} recompute:partitioned", int(plan[2])
    check(run_threads(ranks, live, plan, UNEVEN, (3, 9)), plan, UNEVEN, (3, 9))


def test_sequence_parallelism_divides_the_stream():
    """What sp saves of a block is the norms' share of the other ranks, and nothing else."""
    whole, cut = (block_bytes(ROUND, (3, 8), 2, 4, sp) for sp in (False, True))
    assert whole - cut == 3 * 8 * 2 * (2 * 64 + 1) * torch.float32.itemsize * 3 // 4


def predicted(layers: int) -> int:
    """What sw.predict says of a model of so many blocks, all recomputed."""
    sizes: dict[str, Any] = vars(ROUND) | {"layers": layers, "sequence": 8}
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(vocabulary=61, **sizes))
    batch = random_text(3, 8, 61, 0)
    return predict(model, "dp2 fp32 recompute:full", batch, loss=gpt.loss).activations


def test_predicted_with_recomputation():
    """sw.predict counts the input of a recomputed block, and nothing else of it."""
    assert predicted(3) - predicted(2) == block_bytes(ROUND, (3, 8), 4, recompute="full")


#: Bytes that autograd kept on an H100 (torch 2.11) when blocks 1, 2 and 3 began: gpt in fp16, as
#: `shardwise verify "dp1 fp16" --device cuda` read them for two rows of 63 tokens.
H100 = [619_936, 1_235_840, 1_851_744]


def test_what_the_kernels_of_a_gpu_keep():
    """It is predicted to the byte, without a GPU."""
    model, options = find("gpt"), EngineOptions(loss=gpt.loss, kernels="cuda")
    batch = {name: x[:, :63] for name, x in model.batch(2, 0).items()}
    found = predict_with(model.plain(), "dp1 fp16", batch, options)
    (marks,) = marks_on(found, model.plain(), batch, options)
    blocks = [f"blocks.{n}" for n in (1, 2, 3)]
    assert [m.kept_bytes for m in marks if m.kind == "call" and m.name in blocks] == H100
