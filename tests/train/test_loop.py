"""The loop: one curve for any plan and any interruption, and a stop that loses nothing."""

import io
import itertools
import math
import re
import resource
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.checkpoint.folder import all_in
from shardwise.comm.start.stop_signal import NOTHING
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RankError, RunError
from shardwise.train import config, loop
from shardwise.train.measure.metrics import Record, read
from shardwise.train.model import build
from shardwise.train.prepare import RunStart, checked_plan, prepare
from tests.pool import run_gloo
from tests.train import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The run that nothing interrupts, on one rank: what every other has to equal."""
    return runs.run(runs.settings(tmp_path_factory.mktemp("whole") / "run"))


def same(one: list[Record], other: list[Record]) -> None:
    assert [record.step for record in one] == [record.step for record in other]
    for a, b in zip(one, other, strict=True):
        assert (a.consumed, a.tokens, a.lr) == (b.consumed, b.tokens, b.lr)
        assert a.loss == pytest.approx(b.loss, rel=1e-10)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-9)
        assert (a.validation is None) == (b.validation is None)
        assert (a.validation or 0.0) == pytest.approx(b.validation or 0.0, rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp4 zero1 fp64", "pp2 dp2 zero3 1f1b:2 fp64"])
def test_the_curve_is_that_of_one_rank(plan: str, whole: list[Record], tmp_path: Path) -> None:
    """Loss, gradient norm and validation loss of every step, uneven shares and epochs' ends too."""
    same(runs.run(runs.settings(tmp_path / "run", plan), 4), whole)


def test_the_run_reads_the_text_more_than_once_and_learns(whole: list[Record]) -> None:
    """The test above has seen smaller last batches, and a loss that falls."""
    sizes = [b.consumed - a.consumed for a, b in itertools.pairwise(whole)]
    assert len(set(sizes)) > 1
    assert whole[-1].loss < whole[0].loss - 0.1
    assert [record.step for record in whole if record.validation is not None] == [3, 6, 7]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("plan", "ranks", "saves"),
    [
        ("fp64", 1, {"save_every": 0}),
        ("fp64", 1, {"save_every": 1, "keep": 1, "async_save": True}),
        ("pp2 1f1b:2 fp64", 2, {"save_every": 0}),
    ],
)
def test_a_stopped_run_goes_on_under_another_plan(
    plan: str, ranks: int, saves: dict[str, int], whole: list[Record], tmp_path: Path
) -> None:
    """SIGTERM to one of two ranks stops both after that step; the resumed curve has no seam."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", **saves)
    restored = run_gloo(2, runs.signalled, given, 1, 3)
    assert restored == [True, True]
    assert [path.name for path in all_in(given.folder / "checkpoints")] == ["step-000003"]
    assert not (given.folder / "report.md").exists()
    resumed = runs.settings(tmp_path / "run", plan)
    same(runs.run(resumed, ranks, RunStart(resume=True)), whole)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["prepare", "build", "opening"])
def test_a_signal_before_the_first_step_leaves_no_trace(where: str, tmp_path: Path) -> None:
    """Heard by one of two ranks in start-up, it ends both; the same command can be given again."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64")
    found = run_gloo(2, runs.stopped_early, given, 1, where, None)
    assert [left for left, _ in found] == [True, True]
    assert found[0][1].endswith(f"{NOTHING}\n")
    assert not (tmp_path / "run").exists()
    assert len(runs.run(given, 2)) == 7


@pytest.mark.full
def test_a_signal_before_a_resumed_run_goes_on_keeps_it(
    whole: list[Record], tmp_path: Path
) -> None:
    """What was trained and saved stays, and can be resumed as before."""
    given = runs.settings(tmp_path / "run", save_every=0)
    assert run_gloo(1, runs.signalled, given, 0, 3) == [True]
    [(left, said)] = run_gloo(1, runs.stopped_early, given, 0, "build", RunStart(resume=True))
    assert left and said.endswith(f"{NOTHING}\n")
    same(runs.run(given, start=RunStart(resume=True)), whole)


@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 1f1b:2"])
def test_a_run_leaves_its_report_pictures_and_sample(plan: str, tmp_path: Path) -> None:
    """Everything the summary promises is there, the sample too where no rank has all stages."""
    given = runs.settings(tmp_path / "run", plan)
    texts = run_gloo(2, runs.trained, given, None)
    assert texts[0] == (given.folder / "sample.txt").read_text()
    for name in (
        "report.md",
        "report.html",
        "config.toml",
        "plots/loss.png",
        "plots/memory.png",
        "plots/bytes.png",
    ):
        assert (given.folder / name).stat().st_size > 0


@pytest.mark.full
def test_a_resumed_run_sends_what_is_predicted(tmp_path: Path) -> None:
    """After a last batch of two sequences, and in the third step after a checkpoint."""
    for plan, steps in (("dp2 zero1", 4), ("tp2", 7)):
        given = runs.settings(tmp_path / "run", plan, steps=steps)
        cost, _ = run_gloo(2, runs.costed, given, RunStart(resume=steps > 4))
        assert cost.memory == cost.predicted_memory
        assert cost.sent == cost.predicted_sent


@pytest.mark.full
def test_other_data_cannot_be_resumed_with(tmp_path: Path) -> None:
    """Another seed or other text would make the run's place in the data mean nothing."""
    runs.run(runs.settings(tmp_path / "run", steps=2))
    other = runs.settings(tmp_path / "run", seed=5)
    with pytest.raises(InputError, match=r"train\.seed = 0 \(now 5\)"):
        loop.train(other, alone(), RunStart(resume=True))
    assert config.read(tmp_path / "run" / "config.toml").train.seed == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("told", [True, False])
def test_another_model_cannot_be_resumed_with(told: bool, tmp_path: Path) -> None:
    """The sizes that differ are named where the run says its own; the run stays as it was."""
    given = runs.settings(tmp_path / "run", steps=2)
    runs.run(given)
    file = tmp_path / "run" / "config.toml"
    if not told:
        file.unlink()
    phrase = (
        r"--resume with model\.layers = 1 \(was 2\), model\.width = 24 \(was 16\)\..*"
        r"Write instead: model\.layers = 2, model\.width = 16, or --overwrite"
        if told
        else r"'model/embed\.weight' of shape \(257, 24\)"
    )
    given = given.model_copy(update={"train": given.train.model_copy(update={"steps": 3})})
    sizes = given.model.model_copy(update={"width": 24, "layers": 1})
    with pytest.raises(InputError, match=phrase):
        loop.train(given.model_copy(update={"model": sizes}), alone(), RunStart(resume=True))
    assert file.exists() == told
    if told:
        assert config.read(file).train.steps == 2


@pytest.mark.full
def test_a_run_that_has_made_its_steps_says_so(tmp_path: Path) -> None:
    """Resumed once more, under another plan, no byte of it changes."""
    given = runs.settings(tmp_path / "run", steps=2)
    runs.run(given)
    before = contents(given.folder)
    said = run_gloo(2, runs.said, runs.settings(tmp_path / "run", "dp2 zero3 fp64", steps=2))
    assert said[0] == (
        f"the run in {given.folder} is finished: step 2 of 2. Nothing was changed; to train on: "
        "--resume --set train.steps=4\n"
    )
    assert set(said[1:]) <= {""}
    assert contents(given.folder) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_a_pointer_to_a_checkpoint_that_is_gone_is_said(tmp_path: Path) -> None:
    """The run goes on from the one before, and names both."""
    given = runs.settings(tmp_path / "run", steps=3, eval_every=0)
    runs.run(given)
    shutil.rmtree(given.folder / "checkpoints" / "step-000003")
    said = io.StringIO()
    loop.train(given, alone(), RunStart(resume=True), Console(file=said, width=300))
    assert "names step-000003, which is no complete checkpoint: step-000002 is" in said.getvalue()


@pytest.mark.full
def test_damage_is_answered_with_what_resume_can_follow(tmp_path: Path) -> None:
    """The folder to remove is named; without it the same command goes on from the one before."""
    given = runs.settings(tmp_path / "run", steps=4)
    runs.run(given)
    more = runs.settings(tmp_path / "run", steps=6)
    damaged = given.folder / "checkpoints" / "step-000004"
    for file in damaged.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-9])
    before = contents(given.folder)
    with pytest.raises(InputError, match="it continues from step-000002") as refused:
        loop.train(more, alone(), RunStart(resume=True))
    assert f"Write instead: rm -r {damaged}, then the same command" in str(refused.value)
    assert contents(given.folder) == before
    shutil.rmtree(damaged)
    assert len(runs.run(more, start=RunStart(resume=True))) == 6


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_start_leaves_nothing_behind(ranks: int, tmp_path: Path) -> None:
    """What the engine refuses is refused before the folder is there; mended, it trains."""
    pipeline = "pipedream:4 fp64" if ranks == 2 else "fp64"
    given = runs.settings(tmp_path / "run", f"pp{ranks} {pipeline}")
    if ranks == 1:
        data = given.model.model_copy(update={"heads": 3})
        with pytest.raises(InputError):
            loop.train(given.model_copy(update={"model": data}), alone())
    else:
        with pytest.raises(RankError, match=r"Write instead: --set train\.clip=0"):
            run_gloo(2, runs.trained, given, None)
    assert not given.folder.exists()
    mended = runs.settings(tmp_path / "run", f"pp{ranks} {pipeline}", clip=0, steps=2)
    assert len(runs.run(mended, ranks)) == 2


def test_what_fails_before_its_first_step_is_over_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it could be resumed, so the same command can be given again."""

    def fails(*_: object) -> float:
        raise RuntimeError("no pass today")

    given = runs.settings(tmp_path / "run", steps=2)
    monkeypatch.setattr(loop, "first_pass", fails)
    with pytest.raises(RuntimeError, match="no pass today"):
        loop.train(given, alone())
    assert not given.folder.exists()


def test_memory_that_is_not_there_is_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine seems large enough and its allocator refuses: what was to be kept."""
    monkeypatch.setattr("shardwise.train.sizes.machine_bytes", lambda _: 2**80)
    given = runs.settings(tmp_path / "run")
    model = given.model.model_copy(update={"vocabulary": 10**9, "width": 10**7, "heads": 1})
    with pytest.raises(
        RunError, match=r"Rank 0 ran out of memory .* parameters, whose state takes \d+"
    ):
        loop.train(given.model_copy(update={"model": model}), alone())
    assert not given.folder.exists()


@pytest.mark.parametrize(
    ("plan", "key", "phrase"),
    [
        ("tp2", "sequence", r"data of \d+ tokens with sequences of 1000000000"),
        ("accumulate:1000000000", "batch", r"1 x 1000000000 microbatches, with \d+ training"),
        ("", "batch", r"train.batch = 1000000000 with \d+ training sequences"),
    ],
)
def test_a_number_is_checked_before_memory_of_its_size_is_allocated(
    plan: str, key: str, phrase: str, tmp_path: Path
) -> None:
    """The refusal keeps the process as large as it was."""
    given = runs.settings(tmp_path / "run", plan)
    section = "model" if key == "sequence" else "train"
    part = getattr(given, section).model_copy(update={key: 10**9})
    before = peak_bytes()
    with pytest.raises(InputError, match=phrase):
        prepare(given.model_copy(update={section: part}), 2 if plan == "tp2" else 1, RunStart())
    assert peak_bytes() - before < 2**30


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("section", "values", "phrase"),
    [
        ("plan", {"text": "pp1 1f1b:8"}, r"1 x 8 microbatches\. Allowed: 8 or more.*batch = 8"),
        ("model", {"vocabulary": 100}, r"model\.vocabulary = 100 for bytes"),
        ("model", {"name": "gpt:smal"}, r"Write instead: model\.name = 'gpt:small'"),
        ("model", {"width": 15, "heads": 2}, "width = 15"),
        ("train", {"batch": 1}, r"train\.batch = 1 under the plan"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_anything_is_written(
    section: str, values: dict[str, object], phrase: str, tmp_path: Path
) -> None:
    """Vocabulary, size's name, widths, a batch with less than a sequence a microbatch."""
    given = runs.settings(tmp_path / "run", "accumulate:2")
    part = getattr(given, section).model_copy(update=values)
    with pytest.raises(InputError, match=phrase):
        loop.train(given.model_copy(update={section: part}), alone())
    assert not (tmp_path / "run" / "config.toml").exists()


def staged(folder: Path, stages: str) -> config.Config:
    """A run of two stages that are cut as `stages` says."""
    given = runs.settings(folder, "pp2 1f1b:2 fp64")
    plan = config.PlanSection(text=given.plan.text, stages=stages)
    return given.model_copy(update={"plan": plan})


def cut_at(world: World, given: config.Config) -> list[str]:
    engine = build(prepare(given, world.size, RunStart()), world)
    assert engine.staging is not None
    return engine.staging.begins


@pytest.mark.parametrize("stages", ["blocks.1", "norm", "time"])
def test_stages_are_cut_where_the_configuration_says(tmp_path: Path, stages: str):
    """ConsistencyCheck on all ranks; by time wherever the first rank's clock says."""
    one, other = run_gloo(2, cut_at, staged(tmp_path / "run", stages))
    assert one == other
    assert one in ([["blocks.1"], ["norm"], ["head"]] if stages == "time" else [[stages]])


def saying(world: World, given: config.Config) -> str:
    out = io.StringIO()
    loop.train(given, world, console=Console(file=out, width=300))
    return out.getvalue()


@pytest.mark.full
def test_a_run_balanced_by_time_is_the_same_run(tmp_path: Path, whole: list[Record]):
    """It says where it has cut, and its curve is that of one process."""
    given = staged(tmp_path / "run", "time")
    text, nothing = run_gloo(2, saying, given)
    assert re.search(r"stages begin at [a-z.0-9]+, by time", text)
    assert nothing == ""
    same(read(given.folder), whole)


NO_STAGES = {
    "block.1": "of which block.1 is no module.*plan.stages = 'blocks.1'",
    "Time": "parameters, time, or the modules.*plan.stages = 'time'",
    ",": "parameters, time, or the modules",
    "blocks.1, norm": "2 starts .* for 2 stages",
}


def test_a_plan_and_a_key_for_the_stages_are_refused(tmp_path: Path):
    """The word counts them, so that a key beside it has no effect."""
    given = staged(tmp_path / "run", "time")
    plan = given.plan.model_copy(update={"text": f"{given.plan.text} stages:1,1"})
    with pytest.raises(InputError, match=r"plan\.stages = 'time' under the plan.*'parameters'"):
        checked_plan(given.model_copy(update={"plan": plan}), 2)


@pytest.mark.parametrize("stages", NO_STAGES)
def test_stages_that_are_none_are_refused(tmp_path: Path, stages: str):
    """With what is allowed and the nearest of it, by every rank, and no run is left behind."""
    given = staged(tmp_path / "run", stages)
    with pytest.raises(RankError, match=NO_STAGES[stages]):
        run_gloo(2, saying, given)
    assert not given.folder.exists()


def test_stages_may_be_a_list():
    """As in Python."""
    found = config.build({"plan": {"text": "pp3 1f1b:4", "stages": ["blocks.1", "blocks.3"]}})
    assert found.plan.stages == "blocks.1, blocks.3"


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero2 fp64", "pp2 1f1b:2 fp64"])
def test_a_loss_that_is_not_a_number_names_step_and_rank(plan: str, tmp_path: Path) -> None:
    """Rank 1's loss is NaN in step 4: both ranks stop there, and the checkpoint of step 2 stays.

    Of a pipeline it is the last rank that has a loss, and no loss on meta is taken for one.
    """
    given = runs.settings(tmp_path / "run", plan, save_every=2)
    errors = run_gloo(2, runs.poisoned, given, 1, 4)
    assert errors[0] == errors[1]
    assert "Step 4: the loss is not finite, on rank 1; the first parameter" in errors[0]
    assert str(given.folder / "checkpoints" / "step-000002") in errors[0]
    assert [path.name for path in all_in(given.folder / "checkpoints")] == ["step-000002"]


def test_a_gradient_that_is_not_a_number_names_step_and_ranks(tmp_path: Path) -> None:
    """Every loss is finite, a gradient is not: the ranks that made it, in stages all before it."""
    given = runs.settings(tmp_path / "run", "pp2 1f1b:2 fp64", save_every=2)
    errors = run_gloo(2, runs.poisoned, given, 1, 4, True)
    assert errors[0] == errors[1]
    assert "Step 4: the gradient's norm is nan, not finite, on rank 0, 1; the first" in errors[0]


def test_a_step_can_be_left_out(tmp_path: Path) -> None:
    """With train.on_nonfinite = "skip": the run ends, and its record and report say which step."""
    given = runs.settings(tmp_path / "run", "dp2 zero1 fp64", on_nonfinite="skip")
    assert run_gloo(2, runs.poisoned, given, 1, 4) == ["", ""]
    records = read(given.folder)
    assert [record.skipped for record in records] == [record.step == 4 for record in records]
    assert len(records) == given.train.steps
    assert [math.isfinite(record.loss) for record in records] == [r.step != 4 for r in records]
    assert '"loss": null' in (given.folder / "metrics.jsonl").read_text()
    assert "nan" not in (given.folder / "report.md").read_text()
