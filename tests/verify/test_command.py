"""verify proves what holds, and names what does not."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.cli.verify import verify_command
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RunError
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.verify import comparison, parity
from shardwise.verify import memory_proof as memory
from shardwise.verify.command import verify
from shardwise.verify.inputs import Options, batch_norm_note, dropout_note, without_dropout
from shardwise.verify.parity import engine_of, prove
from shardwise.verify.report import Report, report
from tests.engine.cases import settled
from tests.pool import run_threads
from tests.verify import micro, small


def shortly(
    plan: str, model: str | Trainable, options: Options | None = None, steps: int = 2
) -> Report:
    """A few steps on threads, and memory after one."""
    read = Plan.parse(plan)
    with patch.object(memory, "READ_AFTER", (1,)):
        return report(read, str(model), run_threads(read.size, prove, read, model, steps, options))


#: On the tensor axis by the plan of their configuration, or our table.
TENSOR = [
    *(("llama", "tp2"), ("gemma2", "tp2 sp"), ("gpt2", "tp2 sp"), ("phi3", "tp2")),
    *(("qwen3", "tp4 sp"), ("mistral", "tp4"), ("mixtral", "tp2"), ("qwen3_moe", "tp2 sp")),
]
HOLD = [
    *((model, "dp2 zero3") for model in ("gpt2", "bert", "t5")),
    *(("gpt2", "pp2 1f1b:2"), ("t5", "pp2 1f1b:2"), ("llama", "pp3 zb-h1:3")),
    *((model, "pp2 1f1b:2") for model in ("qwen3", "gemma2", "phi3", "mixtral")),
    *((model, "pp2 1f1b:2") for model in ("bert", "opt", "bart", "mistral")),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "plan"), [*TENSOR, *(pytest.param(*each, marks=pytest.mark.full) for each in HOLD)]
)
def test_models_of_transformers_hold(model: str, plan: str):
    """Tied embeddings, encoders, decoders, mixtures: sharded and in stages, they are one
    process's; of mixtures on the tensor axis the attention is cut.
    """
    pytest.importorskip("transformers")
    found = shortly(f"{plan} fp64", f"toy:{model}")
    assert found.holds and ("tp" not in plan or found.sent["counted"]["tp all_reduce"] > 0)


def doubled(begin: Any, engine: Engine, name: str) -> Any:
    """The update by a gradient that is doubled in every step but the first."""

    def updated(flats: Any, *args: Any, **how: Any) -> Any:
        for flat in (flat for flat in flats if name in flat.names):
            piece = flat.views.part(flat.names.index(name), flat.grads.gshard)
            piece.mul_(2 if engine.steps else 1)
        return begin(flats, *args, **how)

    return updated


def test_a_broken_gradient_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch):
    """One gradient doubled on rank 1 is found: its name, its rank, its error."""
    name, real = "blocks.1.mlp.up.weight", engine_of

    def broken(trainable: Trainable, plan: Plan, world: World, *args: Any) -> Engine:
        engine = real(trainable, plan, world, *args)
        if world.rank == 1:
            engine.optimizer.begin = doubled(engine.optimizer.begin, engine, name)
        return engine

    monkeypatch.setattr(parity, "engine_of", broken)
    found = shortly("dp2 fp64", micro.find("gpt"))
    first = found.first_difference
    assert not found.holds and first is not None
    assert (first.kind, first.name, first.rank) == ("gradients", name, 1)
    assert first.error == pytest.approx(1.0)
    assert f"{name}, on rank 1" in str(found)


class Keeps(nn.Linear):
    """A layer that keeps a statistic of its rows, which nothing reads; and leaves a cycle."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(x.detach().mean(0))
        found: list[Any] = [2 * x.detach()]
        found.append(found)
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return 4 * self.head(y.mean(1))


class Recomputes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Teaches(nn.Module):
    """A teacher without gradients before its student; the loss calls both, and not the model."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (nn.Linear(6, 6) for _ in range(2))


def compared(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = map(model.get_submodule, ("student", "teacher"))
    with torch.no_grad():
        taught = teacher(x)
    return (student(student(x)) - taught).square().mean()


#: What is no difference: a plan, a model, its loss, and the shape of a row.
RIGHT: dict[str, tuple[str, Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]] = {
    # each data rank keeps its own rows' until the next step begins with those of rank 0
    "a buffer that differs between ranks": (
        *("dp2 fp64", lambda: nn.Sequential(Keeps(), nn.Linear(6, 6))),
        *(lambda m, x: m(x).square().mean(), (6,)),
    ),
    # as that of the keys' bias: it is compared with what a last bit of the weights changes
    "the rounding of a gradient that is zero": (
        *("dp2 fp32", Attention),
        *(lambda m, x: functional.cross_entropy(m(x), x[:, 0].argmax(-1)), (9, 16)),
    ),
    # in their phases, after an evaluation too; the teacher is not gathered in the backward
    "a loss that calls modules": ("dp2 zero3 fp64", Teaches, compared, (6,)),
    # after an evaluation as before it
    "a loss that calls the model twice, and reads its weights": (
        *("dp2 zero3 fp64", lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))),
        *(lambda m, x: m(x).square().mean() + m(2 * x).mean() + m[4].weight.mean(), (6,)),
    ),
    "recomputation by the model itself": (
        *("dp2 zero3 bf16", lambda: nn.Sequential(Recomputes(6, 6), nn.Linear(6, 6))),
        *(lambda m, x: m(x).float().square().mean(), (6,)),
    ),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_holds(name: str):
    """No difference is reported, and all bytes are as predicted."""
    plan, make, loss, shape = RIGHT[name]

    def batch(rows: int, seed: int) -> Tensor:
        return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))

    found = shortly(plan, Trainable(name, lambda: settled(make()), loss, batch))
    assert found.holds, (found.first_difference, found.sent)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "seed"), [("dp2 zero3 bf16", 1), ("tp2 fp16", 7), ("pp2 2bw:2 bf16", 40)]
)
def test_what_is_right_in_16_bits_holds_and_leaves_no_folder(
    plan: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """No false alarm, whatever the batches; the checkpoint of the proof is gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for module in (parity, comparison):
        monkeypatch.setattr(module, "SEED", seed)
    found = shortly(plan, "gpt")
    assert found.holds, (found.first_difference, found.uncovered)
    assert not [each for each in tmp_path.iterdir() if "inductor" not in each.name]  # torch's


def units_of(world: World, plan: str) -> int:
    return len({flat.names[0] for flat in engine_of(find("gpt"), Plan.parse(plan), world).flats})


def test_blocks_are_units_however_small():
    """Four blocks of GPT, its embedding, norm and head; one unit where the plan has a bucket."""
    assert run_threads(2, units_of, "dp2 zero3 fp64")[0] >= 7
    assert run_threads(2, units_of, "dp2 fp64 bucket:64MiB")[0] == 1


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
    ("plan", "steps", "phrase"),
    [
        ("dp2", 0, "from 1 to 1000. Write instead: steps=3"),
        ("dp2", 10**9, "steps=1000000000. Allowed: a whole number from 1 to 1000"),
        ("dp99999999", 3, "99999999 processes on this machine"),
        ("accumulate:99999999", 3, "at most 512 microbatches"),
        ("pp2 dp2 interleaved:600x2", 3, "fewer microbatches, which proves the same"),
        ("pp2 interleaved:4x100000000", 3, "800000000 forwards. Allowed: at most 32768"),
        ("pp2 interleaved:4x100", 3, "200 stages for a .* layers"),
        ("dp2 accumulate:257", 3, "fewer microbatches, which proves the same"),
        ("dp2 ep2 bf16", 3, "a mixture of experts.*'dp2 ep2 fp64'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(plan: str, steps: int, phrase: str):
    """No steps, and a plan that no machine could prove."""
    with pytest.raises(InputError, match=phrase):
        verify(plan, "moe" if "ep" in plan else "gpt", steps)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_holds_on_gpus():
    """Ranks that start here, each on a GPU of its own."""
    assert verify("dp2 zero3 fp32", steps=1, device="cuda").holds


def test_dropout_is_set_to_zero_and_the_report_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A model with dropout holds without it; the note stands under the table, beside the JSON."""
    said = "Dropout (1) was set to 0 on both sides of the comparison"
    in_process = lambda args, _, *, fork: run_threads(1, prove, *args[:4])  # noqa: E731, ARG005
    monkeypatch.setattr("shardwise.verify.command._on_new_ranks", in_process)
    monkeypatch.setattr(memory, "READ_AFTER", (1,))
    found = verify("dp1", f"{small.__file__}:drop", 1)
    monkeypatch.setattr("shardwise.cli.verify.verify", lambda *_, **_more: found)
    for json_too in (False, True):
        with pytest.raises(typer.Exit) as leaving:
            verify_command(plan="dp1", model="gpt", as_json=json_too)
        out, err = capsys.readouterr()
        assert leaving.value.exit_code == 0
        assert said in " ".join((err if json_too else out).split())


@pytest.mark.full
def test_a_rank_that_batch_norm_refuses_is_told_why():
    """With one row on a rank torch has no statistics: the reason is given, and no traceback."""
    with pytest.raises(RunError, match=r"has batch norm \(1\), whose statistics") as error:
        verify("dp2", f"{small.__file__}:norm", 1)
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
