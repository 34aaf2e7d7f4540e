"""verify proves what holds, and names what does not."""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from rich.console import Console
from torch import nn

from shardwise.cli.main import main
from shardwise.cli.verify import verify_command
from shardwise.comm.move import begin_sum
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.verify import memory_proof as memory
from shardwise.verify.command import verify
from shardwise.verify.comparison import compare
from shardwise.verify.finding import Finding
from shardwise.verify.not_comparable import batch_norm_note, dropout_note, without_dropout
from shardwise.verify.parity import alone_of, engine_of, prove, theory_of
from shardwise.verify.proof_options import Options
from shardwise.verify.report import Report, report, show
from tests.pool import run_gloo, run_threads
from tests.verify import micro


@pytest.mark.full
def test_a_plan_holds_on_processes():
    """In 16 bits; test_mutations.py proves more plans on threads."""
    plan, model = Plan.parse("pp2 1f1b:2 fp16"), micro.find("gpt")
    assert report(plan, "gpt", run_gloo(2, prove, plan, model, 3)).holds


def shortly(plan: str, model: str | Trainable, options: Options | None = None) -> Report:
    """Two steps on threads, and memory after one."""
    read = Plan.parse(plan)
    with patch.object(memory, "READ_AFTER", (1,)):
        return report(read, str(model), run_threads(read.size, prove, read, model, 2, options))


HOLD = [
    *(("dp2 zero3", model) for model in ("gpt2", "bert", "t5")),
    *(("pp2 1f1b:2", "gpt2"), ("pp2 1f1b:2", "t5"), ("pp3 zb-h1:3", "llama")),
]


@pytest.mark.full
@pytest.mark.parametrize(("plan", "model"), HOLD)
def test_models_of_transformers_hold(plan: str, model: str):
    """Tied embeddings, encoders, decoders: sharded and in stages, they are one process's."""
    pytest.importorskip("transformers")
    assert shortly(f"{plan} fp64", f"hf:{model}").holds


TENSOR = [
    *(("llama", "tp2"), ("gemma2", "tp2 sp"), ("gpt2", "tp2 sp"), ("phi3", "tp2")),
    *(("qwen3", "tp4"), ("mistral", "tp4"), ("mixtral", "tp2 sp"), ("qwen3_moe", "tp2")),
]


@pytest.mark.parametrize(("model", "plan"), TENSOR)
def test_models_of_transformers_hold_on_the_tensor_axis(model: str, plan: str):
    """By the plan of their configuration, or our table; of mixtures the attention is cut."""
    pytest.importorskip("transformers")
    found = shortly(f"{plan} fp64", f"hf:{model}")
    assert found.holds and found.sent["counted"]["tp all_reduce"] > 0


LOGITS = """
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.tensor_table = {"embed": "vocabulary", "head": "vocabulary"}

    def forward(self, x):
        return self.head(self.embed(x))

def batch(rows, seed):
    return torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(seed))

def alone():
    return Words()

def made_with(lost):
    return Words(), lambda model, x: lost(model(x), x), batch

def shifted():
    return made_with(lambda y, x: F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten()))

def smoothed():
    return made_with(lambda y, x: sw.cross_entropy(y, x, label_smoothing=0.1))

def fp32():
    return made_with(lambda y, x: F.cross_entropy(y.float().flatten(0, 1), x.flatten()).double())

def both():
    return made_with(lambda y, x: sw.cross_entropy(y, x) + y.logsumexp(-1).square().mean())

def written():
    def lost(y, x):
        y[..., 3] = 0.5
        return sw.cross_entropy(y, x)
    return made_with(lost)
"""


@pytest.mark.parametrize("build", ["alone", "shifted", "smoothed", "both", "written"])
def test_what_a_loss_does_with_cut_logits_is_predicted(build: str, tmp_path: Path):
    """Gathered where it must be, and summed over the positions that a loss is really taken of."""
    (tmp_path / "words.py").write_text(LOGITS)
    found = shortly("tp2 fp64", f"{tmp_path / 'words.py'}:{build}")
    assert found.holds, found.sent


def test_a_loss_in_fp32_of_logits_in_fp64_is_predicted(tmp_path: Path):
    """Its sums have four bytes a number; its values are not those of fp64."""
    (tmp_path / "words.py").write_text(LOGITS)
    found = shortly("tp2 fp64", f"{tmp_path / 'words.py'}:fp32")
    assert found.sent["counted"] == found.sent["theory"]


def broken(world: World, name: str, after: int = 0) -> Finding:
    """Rank 1 doubles its piece of one gradient after the sum, before the update; some later."""
    plan, trainable = Plan.parse("dp2 fp64"), find("gpt")
    ours = engine_of(trainable, plan, world)
    if world.rank == 1:
        break_gradient(ours, name, after)
    return compared(ours, trainable, 3)


def compared(ours: Engine, trainable: Trainable, steps: int) -> Finding:
    """So many steps beside one process."""
    oracles = alone_of(trainable, ours.plan, ours.world.device)
    theory = theory_of(trainable, ours.plan, ours.world.rank, None)
    return compare(ours, oracles, theory, trainable.batch, steps)


def break_gradient(engine: Engine, name: str, after: int) -> None:
    update, param = engine.optimizer.step, engine.model.get_parameter(name)

    def step(flats: Sequence[Flat] | None = None, factor: float = 1.0) -> None:
        if flats and any(param is p for flat in flats for p in flat.params):
            assert param.grad is not None
            param.grad.mul_(2 if engine.steps >= after else 1)
        update(flats, factor)

    engine.optimizer.step = step


@pytest.mark.cases(1)
@pytest.mark.parametrize("after", [0, 1])
def test_a_broken_gradient_is_named_with_its_rank(after: int):
    """One gradient doubled on rank 1 is found, in the step it is: its name, its rank, its error."""
    name = "blocks.2.mlp.up.weight"
    found = report(Plan.parse("dp2 fp64"), "gpt", run_threads(2, broken, name, after))
    first = found.first_difference
    assert not found.holds and first is not None
    assert (first.kind, first.name, first.rank) == ("gradients", name, 1)
    assert first.error == pytest.approx(1.0)
    shown = Console(record=True, width=200)
    show(found, shown)
    assert f"{name}, on rank 1" in shown.export_text()


def miscounted(world: World) -> Finding:
    """A rank that sends eight bytes more than it should."""
    plan, trainable = Plan.parse("dp2 fp64"), find("gpt")
    ours = engine_of(trainable, plan, world)
    apply = ours.consensus.apply

    def talkative(summed: Sequence[float], differs: float) -> None:
        apply(summed, differs)
        begin_sum(torch.zeros(1, dtype=torch.float64), ours.axes[1]).wait()

    ours.consensus.apply = talkative
    return compared(ours, trainable, 1)


def test_bytes_that_were_not_predicted_are_found():
    """One message of eight bytes too many and the plan does not hold, though all values do."""
    found = report(Plan.parse("dp2 fp64"), "gpt", run_threads(2, miscounted))
    assert not found.holds and found.first_difference is None
    assert sum(found.sent["counted"].values()) == sum(found.sent["theory"].values()) + 8


@pytest.mark.full
def test_json_has_exactly_these_keys():
    """The object that scripts read, from processes that verify starts itself."""
    found: dict[str, Any] = json.loads(verify("dp2 zero2", "gpt", steps=1).json())
    keys = ["plan", "model", "holds", "bound", "parity", "bytes", "memory", "in_step"]
    assert list(found) == [*keys, "first_difference", "uncovered", "strays", "columns"]
    assert found["plan"] == "dp2 zero2 fp64" and found["holds"]
    kinds = ["loss", "gradients", "weights", "optimizer", "buffers", "evaluation", "outputs"]
    assert list(found["parity"]) == [*kinds, "after loading", "not finite"]
    assert {*found["bytes"], *found["memory"]} == {"theory", "counted", "read"}
    assert found["columns"]["read"] == "read from the system"
    assert found["bytes"]["counted"] == found["bytes"]["theory"]
    assert found["memory"]["read"] == found["memory"]["theory"]


@pytest.mark.parametrize(
    ("plan", "model", "steps", "phrase"),
    [
        ("dp2 zero9", "gpt", 3, "no plan word"),
        ("dp2", "hf:lama", 3, "hf:llama"),
        ("dp2", "gpt", 0, "from 1 to 1000. Write instead: steps=3"),
        ("dp2", "gpt", 10**9, "steps=1000000000. Allowed: a whole number from 1 to 1000"),
        ("dp99999999", "gpt", 3, "99999999 processes on this machine"),
        ("accumulate:99999999", "gpt", 3, "at most 512 microbatches"),
        ("pp2 dp2 interleaved:600x2", "gpt", 3, "'pp2 dp2 interleaved:4x2 fp64', which proves"),
        ("pp2 interleaved:4x100000000", "gpt", 3, "800000000 forwards. Allowed: at most 32768"),
        ("pp2 interleaved:4x100", "gpt", 3, "200 stages for a .* layers"),
        ("dp2 accumulate:257", "gpt", 3, "'dp2 fp64 accumulate:2', which proves the same"),
        ("tp8", "gpt", 3, "tp8 for a model of 4 query heads.*Write instead: tp4"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    plan: str, model: str, steps: int, phrase: str
):
    """An unknown word or model, no steps, a plan for later, one no machine could prove."""
    with pytest.raises(InputError, match=phrase):
        verify(plan, model, steps)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_holds_on_gpus():
    """Ranks that start here, each on a GPU of its own."""
    assert verify("dp2 zero3 fp32", steps=1, device="cuda").holds


OWN = """
import torch
from torch import nn

def linear():
    return nn.Linear(6, 6)

def batch(rows, seed):
    return torch.ones(rows, 6)

def mean(model, x):
    return model(x).mean()

def fixed():
    return linear(), lambda model, x: mean(model, x.float()), batch

def narrow():
    return linear(), mean, lambda rows, seed: torch.ones(rows, 7)

def a_row_each():
    return linear(), lambda model, x: model(x).sum(1), batch

def number():
    return linear(), lambda model, x: mean(model, x).item(), batch

def words():
    return linear(), mean, lambda rows, seed: "words"

def frozen():
    return linear().requires_grad_(False)

def norm():
    return nn.Sequential(linear(), nn.BatchNorm1d(6), linear())

def asks():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden) * hidden.sum().item()

    return Asks()

def drop():
    return nn.Sequential(linear(), nn.Dropout(0.5), linear())
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize(
    ("build", "phrase"),
    [
        ("fixed", r"step in fp64 .* must have the same dtype.*\(own\.py, line \d+\)"),
        ("narrow", r"shapes cannot be multiplied \(2x7 and 6x6\) \(own\.py, line 12\)"),
        ("a_row_each", r"a loss that returns a tensor of shape \(2,\)"),
        ("number", r"a loss that returns a float"),
        ("words", r"a batch without a tensor that has rows \(str\)"),
        ("frozen", r"all frozen"),
    ],
)
def test_a_model_that_cannot_be_trained_is_answered_once(own: str, build: str, phrase: str):
    """Its own error, with the line of its file, before any rank is started."""
    with pytest.raises(InputError, match=phrase) as error:
        verify("dp2", f"{own}:{build}")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "build", "phrase"),
    [
        ("pp2", "asks", r"item of an activation in own\.py:43, which gives"),
    ],
)
def test_what_only_a_rank_finds_is_answered_once(
    own: str, plan: str, build: str, phrase: str, capsys: pytest.CaptureFixture[str]
):
    """Each rank refuses the model: the command says it once, without traceback, and ends with 2."""
    with pytest.raises(SystemExit) as leaving:
        main(["verify", plan, "--model", f"{own}:{build}"])
    said = capsys.readouterr().err.strip()
    assert leaving.value.code == 2
    assert re.match(f"Given: {phrase}", said) and said.count("Write instead:") == 1
    assert len(said.splitlines()) == 1


def test_dropout_is_set_to_zero_and_the_report_says_so(
    own: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A model with dropout holds without it; the note stands under the table, beside the JSON."""
    said = "Dropout (1) was set to 0 on both sides of the comparison"
    found = verify("dp2", f"{own}:drop", 1)
    monkeypatch.setattr("shardwise.cli.verify.verify", lambda *_, **_more: found)
    for json_too in (False, True):
        with pytest.raises(typer.Exit) as leaving:
            verify_command(plan="dp2", model=f"{own}:drop", as_json=json_too)
        out, err = capsys.readouterr()
        assert leaving.value.exit_code == 0
        assert said in " ".join((err if json_too else out).split())


@pytest.mark.full
def test_a_rank_that_batch_norm_refuses_is_told_why(own: str):
    """With one row on a rank torch has no statistics: the reason is given, and no traceback."""
    with pytest.raises(RunError, match=r"has batch norm \(1\), whose statistics") as error:
        verify("dp2", f"{own}:norm", 1)
    assert "Rank 1 could not continue: ValueError: Expected more than 1 value" in str(error.value)
    assert "Traceback" not in str(error.value)


NORMS = {
    "": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(), nn.LSTM(2, 2)),
    "batch norm (the model itself)": nn.BatchNorm2d(3),
    "batch norm (0), whose": nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()),
}


@pytest.mark.parametrize("said", NORMS)
def test_batch_norm_under_a_plan_that_divides_the_batch_is_named(said: str):
    """By ranks or by microbatches; nothing is said of other models and plans."""
    for plan in map(Plan.parse, ("dp2", "dp2 tp2", "tp2 accumulate:2", "pp2 1f1b:4")):
        note = batch_norm_note(NORMS[said].train(), plan)
        assert said in note
        assert bool(note) == bool(said)
        assert ("of each microbatch's rows" in note) == bool(said and plan.pipeline)
        assert batch_norm_note(NORMS[said].eval(), plan) == ""
    for plan in ("tp2 sp", "pp2 naive"):
        assert batch_norm_note(NORMS[said].train(), Plan.parse(plan)) == ""


DROPOUTS = {
    "": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LSTM(2, 2)),
    "Dropout (0, 1, 2 and 1 more)": nn.Sequential(*[nn.Dropout(0.1) for _ in range(4)]),
    "Dropout (attention)": nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, 0.25)}),
    "Dropout (rnn)": nn.ModuleDict({"rnn": nn.GRU(2, 2, 2, dropout=0.5)}),
}


@pytest.mark.parametrize("said", DROPOUTS)
def test_rates_of_dropout_are_found_and_set_to_zero(said: str):
    """In layers of their own, or as a rate of attention and recurrent layers."""
    model = DROPOUTS[said].train()
    assert said in dropout_note(model) and bool(dropout_note(model)) == bool(said)
    made = Trainable("", lambda: deepcopy(model), lambda m, _: m(0), lambda *_: 0)
    assert dropout_note(without_dropout(made).build()) == ""
