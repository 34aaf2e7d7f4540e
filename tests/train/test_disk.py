"""What a run says of its disk at the end, and what does not count as memory."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm.tiers.disk_use import Used
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.models.gpt import GPT, SIZES, parameters
from shardwise.models.gpt import loss as gpt_loss
from shardwise.train import loop
from shardwise.train.config_sections import OffloadSection, SampleSection
from shardwise.train.measure.disk_line import disk_line
from shardwise.train.sizes import disk_bytes, state_bytes
from tests.pool import run_gloo
from tests.train.runs import settings


def said(world: World, folder: str, words: str) -> str:
    """What rank 0 says after a step."""
    engine: Any = sw.parallelize(
        torch.nn.Linear(4, 4),
        f"dp2 zero2 {words}",
        world,
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=folder,
    )
    engine.step(torch.ones(2, 4))
    return disk_line(engine)


def test_the_bandwidth_of_both_ranks(tmp_path: Path) -> None:
    """On rank 0, with the folder; nothing where no states are on a disk."""
    first, second = run_gloo(2, said, str(tmp_path), "offload:optim@disk")
    pattern = (
        r"disk .*: 2 ranks read 0 MiB at \d+ MiB/s and wrote 0 MiB at \d+ MiB/s; "
        r"they waited \d+\.\d s for it$"
    )
    assert re.match(pattern, first)
    assert str(tmp_path) in first
    assert second == ""
    assert run_gloo(2, said, str(tmp_path), "") == ["", ""]
    assert list(tmp_path.iterdir()) == []


def used(world: World, folder: str) -> list[tuple[int, int]]:
    """Bytes read and written: predicted of two steps, in the steps, and in an evaluation."""
    engine: Any = sw.parallelize(
        torch.nn.Linear(300, 300),
        "zero3 fp32 offload:param@disk",
        world,
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=folder,
    )
    uses = [_used(engine)]
    for act in (engine.step, engine.step, engine.evaluate):
        act(torch.ones(2, 300))
        uses.append(_used(engine))
    sent = engine.measured_bytes()
    found = [uses[2] - uses[0], uses[3] - uses[2]]
    return [
        (2 * sent["tier disk_to_host"], 2 * sent["tier host_to_disk"]),
        *((use.read_bytes, use.written_bytes) for use in found),
    ]


def _used(engine: Any) -> Used:
    engine.disk.sync()
    return engine.disk.use.so_far


def test_the_disk_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    """The same bytes in steps; an evaluation writes nothing."""
    for expected, steps, evaluation in run_gloo(2, used, str(tmp_path)):
        assert steps == expected
        assert evaluation[0] > 0 == evaluation[1]


@pytest.mark.full
def test_a_sample_from_parameters_on_a_disk_is_made_only_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without sample.tokens the run says why there is none; with it the sample is printed."""
    for tokens, expected in ((None, True), (2, False)):
        given = settings(tmp_path / f"run{tokens}", "fp32 offload:param@disk")
        chosen: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
        changed = {
            "sample": SampleSection(**chosen),
            "offload": OffloadSection(folder=str(tmp_path)),
        }
        summary = loop.train(given.model_copy(update=changed), alone())
        assert summary is not None
        said = capsys.readouterr().out
        assert ("no sample: each of its 240 tokens" in said) == expected
        assert (summary.sample == "") == expected
        assert "memory of the process" in said


@pytest.mark.parametrize(
    "words",
    [
        *("dp2 zero2 offload:optim@disk", "dp2 zero3 offload:param@disk", "dp2 offload:optim@disk"),
        *("dp1 bf16 offload:optim@disk", "dp2 zero3 bf16 offload:param@disk", "dp2 zero3"),
    ],
)
def test_the_disk_that_a_run_needs_is_known_before_it_starts(words: str) -> None:
    """The bytes of all ranks are those that the prediction has for each, without padding."""
    sizes, plan = SIZES["tiny"], Plan.parse(words)
    with torch.device("meta"):
        model = GPT(sizes)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    batch = {"inputs": tokens, "targets": tokens}
    found = sw.predict(model, plan, batch, loss=gpt_loss)
    assert disk_bytes(sizes, plan) == pytest.approx(
        plan.size * sum(found.disk_memory.values()), rel=1e-3
    )


def test_a_disk_that_is_too_small_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paragraph has the bytes that are free, and those that the run needs."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    given = settings(tmp_path / "run", "fp32 offload:optim@disk")
    changed = {"offload": OffloadSection(folder=str(tmp_path))}
    with pytest.raises(InputError, match=r"whose disk has 1 B free.*take \d+\.\d KiB"):
        loop.train(given.model_copy(update=changed), alone())
    assert not given.folder.exists()


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("dp2 zero2 offload:optim", 2 * 4 + 4 + 8),
        ("dp2 zero2 offload:optim@disk", 2 * 4),
        ("dp2 zero3 offload:param@disk", 0),
        ("dp1 bf16 offload:param@disk", 0),
    ],
)
def test_what_rests_on_a_disk_needs_no_memory(words: str, each: int) -> None:
    """Bytes a parameter on all ranks: a run that does not fit the memory may rest on a disk."""
    sizes, plan = SIZES["tiny"], Plan.parse(words)
    assert state_bytes(sizes, plan) == each * parameters(sizes)
