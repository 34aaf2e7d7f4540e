"""A prediction made before a run is what the run holds and sends, to the byte."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.cli.main import main
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.engine.predict import predict, predict_with
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.gpt import loss as gpt_loss
from shardwise.models.moe import loss as moe_loss
from shardwise.models.registry import find
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.traffic import TrafficLine, by_kind, start_bytes
from shardwise.techniques.expert.expert_moves import Loads
from shardwise.techniques.expert.gate import GATES
from shardwise.techniques.expert.price import EVEN
from shardwise.verify.parity import build_options
from shardwise.verify.proof_options import Options
from tests.engine.tensors import sent
from tests.expert import moe
from tests.pool import run_threads
from tests.predict.model import SMALL, batch, engine, foreseen, options_of, plain

PLANS = [
    *("dp1 zero3", "dp2 zero2 accumulate:3", "dp_replicate2 dp_shard2 zero1"),
    *("pp2 dp2 zero3 1f1b:4", "pp2 2bw:4"),
]


def trained(world: World, plan: str, kind: str, clip: float | None, sends: bool) -> list[bool]:
    """Whether the start and two steps sent what was predicted, and memory is as predicted."""
    options = {"clip": clip, "least_unit_bytes": 0, "broadcast_buffers": sends}
    ours = engine(world, plan, kind, **options)
    theory = foreseen(world.rank, plan, kind, **options)
    rows = 2 * ours.microbatches + (kind == "gpt")  # microbatches of several sizes
    given = [batch(ours, kind, step, rows) for step in range(2)]
    told = theory.of(given[0])
    begun = {TrafficLine(*key): t.sent_bytes for key, t in ours.sent().items() if t.sent_bytes}
    piped = ours.plan.pipeline is not None  # and its channels are opened, which is not predicted
    held = [piped or begun == start_bytes(ours.plan, told.model, world.rank)]
    for step in range(2):
        ours.step(given[step])
        held.append(sent(ours) == told.in_step(step))
    return [*held, ours.memory() == told.memory, ours.measured_bytes() == told.bytes]


@pytest.mark.parametrize(
    ("plan", "sends"), [*((plan, True) for plan in PLANS), ("dp2 zero2 accumulate:3", False)]
)
def test_a_run_is_as_predicted(plan: str, sends: bool):
    """Frozen layers, two types, buffers: bytes on every line and memory by category."""
    clip = None if "pipedream" in plan or "2bw" in plan else 1.0
    ranks = Plan.parse(plan).size
    assert run_threads(ranks, trained, plan, "mixed", clip, sends) == [[True] * 5] * ranks


class Choosing(nn.Module):
    """Reads a value to decide which of its layers it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_what_depends_on_values_is_said():
    """A model that reads values is run on the batch itself, and the prediction has a note."""
    found = predict(Choosing(), "dp2 zero3", torch.ones(2, 4), loss=loss)
    assert len(found.notes) == 1 and "depends on values" in found.notes[0]
    with torch.device("meta"):
        model = Choosing()
    with pytest.raises(InputError, match="on the meta device whose forward reads values"):
        predict(model, "dp2 zero3", torch.ones(2, 4), loss=loss)


@pytest.mark.parametrize("name", GATES)
def test_bytes_of_tokens_are_between_bounds(name: str):
    """Without values an even load is assumed, within what is possible, and a note says so."""
    model, rows = moe.model(name, 1.25).to("meta"), moe.batch(name, 2, 0)
    alone = predict(model, "dp2 zero3", rows, loss=moe_loss)
    assert not alone.notes and not alone.bytes_between
    found = predict(model, "dp4 ep2 zero3", rows, loss=moe_loss, rank=3)
    ((kind, (least, most)),) = found.bytes_between.items()
    assert least <= found.bytes[kind] <= most
    assert found.notes == (EVEN,) and found.activations > 0


@pytest.mark.parametrize("name", ["topk", "expert-choice"])
def test_a_prediction_stores_nothing_for_each_rank(name: str):
    """Ten million ranks cost as much memory as two."""
    model, rows = moe.model(name).to("meta"), moe.batch(name, 2, 0)
    found = predict(model, "dp10000000 ep2 zero3", rows, loss=moe_loss)
    tracemalloc.start()
    assert found.bytes and found.memory
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**24


def test_the_bounds_are_reached():
    """Tokens that all stay on their rank send nothing, and tokens that all leave the most."""
    model, rows = moe.model("topk"), moe.batch("topk", 2, 0)
    found = predict(model, "dp2 ep2", rows, loss=moe_loss)
    tokens, layers = rows["inputs"].numel(), found.spec.expert_layers
    own, other = (tokens, tokens, 0, 0), (0, 0, tokens, tokens)
    bounds = found.bytes_between["ep all_to_all"]
    for choices, bound in zip(((own, other), (other, own)), bounds, strict=True):
        loads = Loads((tokens, tokens), dict.fromkeys(layers, choices))
        sent = by_kind(found.in_step(5, loads=(loads,)))
        assert sent.get("ep all_to_all", 0) == bound


def test_bytes_that_the_gate_fixes():
    """Where every token goes to every expert, there is one number."""
    model, rows = moe.model("topk", experts=2), moe.batch("topk", 2, 0)
    found = predict(model, "dp2 ep2", rows, loss=moe_loss)
    exact = found.bytes["ep all_to_all"]
    assert found.bytes_between == {"ep all_to_all": (exact, exact)}


def test_the_model_stays_as_it_is():
    """Neither hooks nor gradients nor other types are left on it."""
    model, options = plain("gpt"), options_of("gpt")
    before = {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    rows = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("inputs", "targets")}
    predict(model, "dp2 zero3 bf16", rows, **options)
    assert before == {name: (id(p), p.dtype, p.device) for name, p in model.named_parameters()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def large(plan: str) -> Prediction:
    with torch.device("meta"):
        model = GPT(GPTConfig(width=64, hidden=128, tied=False, **SMALL))
    rows = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("inputs", "targets")}
    return predict(model, plan, rows, loss=gpt_loss, rank=1)


@pytest.mark.full
def test_a_world_of_any_size():
    """Nothing is computed for each rank: of 5000 the numbers are those of the formulas."""
    few, many = large("dp2 zero3"), large("dp5000 zero3")
    assert many.world == 5000 and many.memory["parameters"] < few.memory["parameters"] // 100
    assert few.activations == many.activations > 0


def test_a_rank_that_is_not_there_is_refused():
    """With the ranks that the plan has."""
    with pytest.raises(InputError, match=r"rank=1\. Allowed: a whole number from 0 to 0"):
        large("dp1")


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["predict", *argv])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.full
def test_the_command_has_one_object(capsys: pytest.CaptureFixture[str]):
    """Its keys are what scripts read; the sequence and the batch change activations alone."""
    code, out, _ = command(capsys, "dp64 zero3 bf16", "--rank", "63", "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == [
        *("plan", "model", "world", "rank", "memory", "bytes", "bytes_between", "activations"),
        *("host_activations", "fetched", "device_peak", "recomputed", "recomputed_flops"),
        *("messages", "seconds", "step_time", "time_ms", "peak_parts", "in_all", "rows_a_step"),
        *("tokens_a_step", "device_memory", "fits", "largest_part", "relieved_by"),
    ]
    assert (found["plan"], found["world"], found["rank"]) == ("dp64 zero3 bf16", 64, 63)
    assert list(found["bytes"]) == ["dp all_gather", "dp all_reduce", "dp reduce_scatter"]
    longer = command(capsys, "dp64 zero3 bf16", "--sequence", "128", "--batch", "4", "--json")
    other = json.loads(longer[1])
    assert other["bytes"] == found["bytes"] and other["activations"] > found["activations"]


NET = """
import torch
from torch import nn

def build():
    with torch.device("{device}"):
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
"""


def test_a_model_on_meta_is_predicted_and_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`file.py:build` without weights: the numbers of the same model with weights; no proof."""
    found: list[dict[str, Any]] = []
    for device in ("cpu", "meta"):
        file = tmp_path / f"{device}.py"
        file.write_text(NET.format(device=device))
        code, out, _ = command(capsys, "dp2 tp2 zero3", "--model", f"{file}:build", "--json")
        assert code == 0
        found.append(json.loads(out))
    for key in found[0].keys() - {"model", "time_ms"}:
        assert found[0][key] == found[1][key]
    with pytest.raises(InputError, match="on the meta device, which has no weights"):
        find(f"{tmp_path / 'meta.py'}:build").build()


@pytest.mark.parametrize("words", ["offload:auto device_memory:16MiB", "device_memory:16MiB"])
def test_the_function_returns_what_the_command_prints(
    words: str, capsys: pytest.CaptureFixture[str]
):
    """The offload that is chosen, the peak on the device, and a note if it is above the bound."""
    plan = f"dp2 zero3 fp32 {words}"
    code, out, err = command(capsys, plan, "--json")
    printed = json.loads(out)
    model = find("gpt")
    options = replace(build_options(model, Plan.parse(plan), Options()), clip=1.0)
    found = predict_with(model.plain(), plan, model.make_batch(2, 0), options)
    assert (code, str(found.plan)) == (0, printed["plan"])
    assert found.device_peak == printed["device_peak"]
    assert [f"Note: {note}." for note in found.notes] == err.splitlines()
    chosen = found.plan.offload
    assert chosen not in (None, "auto") if "auto" in words else chosen is None
    above = any("more than device_memory allows" in note for note in found.notes)
    assert above == (found.device_peak > 2**24) == ("auto" not in words)
