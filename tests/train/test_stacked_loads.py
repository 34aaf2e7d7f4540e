"""Loads of mixtures of transformers in a run: those of one process, under every plan."""

from pathlib import Path

import pytest
import torch

from shardwise.models.hf import Wide
from shardwise.train import experts
from shardwise.train.metrics import Record
from shardwise.train.prepare import Start, prepare
from shardwise.train.progress import line
from tests.train.runs import run
from tests.train.test_pretrained import configured, folder

transformers = pytest.importorskip("transformers")


def assert_same(found: list[Record], expected: list[Record]) -> None:
    """Loads and dropped choices are equal, and entropies to 1e-10."""
    assert [each.expert_loads for each in found] == [each.expert_loads for each in expected]
    assert [each.dropped for each in found] == [0.0] * len(expected)
    entropies = [each.gate_entropy for each in expected]
    assert [each.gate_entropy for each in found] == pytest.approx(entropies, rel=1e-10)


@pytest.mark.full
def test_loads_are_those_of_transformers(tmp_path: Path):
    """The choices and the entropy of the first step, from the router's logits by hand."""
    weights = folder("mixtral", tmp_path / "w")
    given = configured(tmp_path / "run", weights, "fp64", steps=2)
    first = run(given)[0]
    prepared = prepare(given, 1, Start(overwrite=True))
    rows = prepared.corpus.rows(prepared.batches.numbers(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(weights).double()
    with torch.no_grad(), Wide():
        made = plain(torch.from_numpy(rows.inputs), output_router_logits=True)
    assert first.expert_loads is not None
    for number, (name, own) in enumerate(first.expert_loads.items()):
        assert name == f"model.layers.{number}.mlp.experts"
        chosen = made.router_logits[number].topk(2, dim=-1).indices
        assert own == chosen.flatten().bincount(minlength=4).tolist()
    p = torch.stack(made.router_logits).softmax(-1).double()
    assert first.gate_entropy == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-6)
    assert "busiest expert" in line(first, 2)
    assert "gate entropy 1.3" in line(first, 2)
    assert (given.folder / "plots" / experts.PICTURE).stat().st_size > 0
    assert "The busiest expert" in (given.folder / "report.md").read_text()


def assert_plan(kind: str, plan: str, at: Path) -> None:
    weights = folder(kind, at / "w")
    expected = run(configured(at / "one", weights, "fp64", steps=2))
    for record in expected:
        assert {sum(own) for own in (record.expert_loads or {}).values()} == {2 * record.tokens}
    assert_same(run(configured(at / "two", weights, f"{plan} fp64", steps=2), ranks=2), expected)


@pytest.mark.crossed
@pytest.mark.full
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("plan", ["dp2 zero3", "dp2 ep2 zero2", "tp2", "pp2 1f1b:2"])
def test_every_plan_records_the_loads_of_one_process(kind: str, plan: str, tmp_path: Path):
    """All layers of all stages, each token once, also where ranks compute the same tokens."""
    assert_plan(kind, plan, tmp_path)


@pytest.mark.full
def test_loads_of_shards_of_the_sequence(tmp_path: Path):
    """Under sp the tensor ranks count the tokens of their shards, and their loads are added."""
    assert_plan("mixtral", "tp2 sp", tmp_path)


@pytest.mark.full
def test_a_recomputation_is_not_counted(tmp_path: Path):
    """A pass that is recomputed is one pass: loads are those of a run that keeps activations."""
    weights = folder("mixtral", tmp_path / "w")
    expected = run(configured(tmp_path / "one", weights, "fp32 accumulate:2", steps=2))
    words = "fp32 accumulate:2 recompute:full"
    assert_same(run(configured(tmp_path / "two", weights, words, steps=2)), expected)
