"""What a run shows: its lines, its report as text and as a page; and what it measures."""

import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.prediction.time.step_time import StepTime
from shardwise.train import config, metrics, progress, run_folder, run_report
from shardwise.train import run as training
from shardwise.train.data.packed import Packed
from shardwise.train.data.tokens import ByteVocabulary
from shardwise.train.metrics import Record
from shardwise.train.prepare import RunStart
from shardwise.train.run_report import report_of, write
from shardwise.train.summary import RankCost, Summary, disk_line, time_cost
from tests.engine.cases import squares
from tests.pool import run_gloo
from tests.train import runs

BYTES = ByteVocabulary()
PACKED = Packed("key", np.zeros(2000, np.uint16), 1000, 3, BYTES)
MIB = 2**20
ONE = Record(
    step=1, consumed=8, loss=3.5, lr=1e-3, tokens=64, seconds=0.5, tokens_per_s=128.0, mfu=0.25,
    sent_bytes=1000,
)  # fmt: skip


def summary(folder: Path, *costs: RankCost) -> Summary:
    (folder / "plots").mkdir(exist_ok=True)
    records = [replace(ONE, step=n, loss=4 - n / 10) for n in range(1, 9)]
    records[-1] = replace(records[-1], validation=1.5)
    return Summary(
        config=config.build({"run": {"folder": str(folder)}}), plan="dp2 zero3", ranks=len(costs),
        parameters=1234, packed=PACKED, records=records, unigram=3.0, costs=costs,
    )  # fmt: skip


def whole(path: Path) -> Summary:
    """A run with each section of a report."""
    held = {"parameters": 3 * MIB, "gradients": 3 * MIB, "optimizer": 6 * MIB}
    sent = {"dp all_reduce": 6 * MIB, "pp send": MIB}
    cost = RankCost(held, held, sent | {"ep all_to_all": MIB}, sent, ("ep all_to_all",))
    path.mkdir()
    given = summary(path, *[cost] * 4)
    loads = {f"blocks.{n}.moe": [9, 7, 1, 15] for n in range(2)}
    return replace(
        given,
        plan="dp2 pp2 ep2 1f1b:4 | head: zero2",
        records=[replace(record, expert_loads=loads) for record in given.records],
    )


# --- lines of a run -----------------------------------------------------------------------------


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, highlight=False), file


def test_a_log_gets_plain_lines():
    """The first step, evaluations and the last have a line; other ranks write none."""
    texts: list[list[str]] = []
    for first in (True, False):
        out, file = console(terminal=False)
        with progress.display(100, first=first, console=out) as shown:
            shown.step(ONE)
            shown.step(replace(ONE, step=2))
            shown.step(replace(ONE, step=3, validation=3.25, memory_bytes={"parameters": 2048}))
            shown.step(replace(ONE, step=100, mfu=None))
            shown.note("saved")
        texts.append(file.getvalue().splitlines())
    lines, others = texts
    heads = ["step 1/100", "step 3/100", "step 100/100", "saved"]
    assert [line.split("  ")[0] for line in lines] == heads and others == []
    assert lines[0] == "step 1/100  loss 3.5000  128 tokens/s  MFU 25.0%  rank 0 sends 1000 B/step"
    assert "validation 3.2500" in lines[1] and "holds parameters 2.0 KiB" in lines[1]
    assert "MFU" not in lines[2]
    routed = replace(ONE, expert_loads={"moe": [3, 1]}, dropped=0.25, gate_entropy=0.5)
    said = "busiest expert 1.50x the mean, 25.0% dropped, gate entropy 0.50"
    assert said in progress.line(routed, 9)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_bar_below_the_lines(terminal: bool):
    """With the steps that are made; a note is text in one line, whose brackets are no markup."""
    out, file = console(terminal)
    with progress.display(100, first=True, console=out) as shown:
        shown.step(ONE)
        shown.step(replace(ONE, step=2))
        shown.note("tokens of data/[ab]/[/x]\n*.txt")
    text = file.getvalue()
    assert "step 1/100" in text and ("  2/100" in text) == terminal
    assert "tokens of data/[ab]/[/x]\\n*.txt" in text


def test_the_peak_is_that_of_the_cluster_or_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch):
    """A preset by the name that CUDA gives, by precision; no other device has an MFU."""
    cuda, plan = torch.device("cuda"), Plan.parse("dp2 bf16")
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", None), ("L4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert metrics.peak_flops(None, plan, cuda) == peak
    assert metrics.peak_flops("a100-80gb", Plan(), torch.device("cpu")) == 19.5e12
    assert metrics.peak_flops(None, plan, torch.device("cpu")) is None


# --- the report ---------------------------------------------------------------------------------


def written(given: Summary) -> str:
    assert write(report_of(given), given.config.folder) == []
    return (given.config.folder / "report.md").read_text()


def test_the_report_holds_the_numbers_and_the_pictures(tmp_path: Path) -> None:
    """Loss, baseline and its distance, measured beside predicted; three pictures."""
    held = {"parameters": 4096}
    cost = RankCost(held, held, {"all_gather": 10}, {"all_gather": 12})
    text = written(summary(tmp_path, cost, cost))
    for part in (
        "dp2 zero3 on 2 ranks",
        "1,234 parameters",
        "50% below the unigram baseline",
        "1.5000 nats a token, 4.328 bits a byte",  # of which each has two tokens
        "| training loss | 3.2000 nats a token in the last step, 3.4953 smoothed |",
        "4.0 KiB (4,096 bytes, as predicted) by each rank",
        "10 B (10 bytes, predicted 12 B, 12 bytes) by each rank",
        "| all_gather | 10 | 12 |",
    ):
        assert part in text
    for name in ("loss", "memory", "bytes"):
        assert "<svg" in (tmp_path / "plots" / f"{name}.svg").read_text()
        assert f"plots/{name}.svg" in text


def test_the_rank_with_most_is_named(tmp_path: Path):
    """Of a pipeline; one rank alone sends nothing, and what was not predicted is a dash."""
    costs = [RankCost({"x": n}, {"x": n}, {"send": m}, {"send": m}) for n, m in ((8, 9), (9, 8))]
    text = report_of(summary(tmp_path, *costs)).text
    most = "9 B (9 bytes, as predicted) by rank"
    assert f"| sent in a step | {most} 0, the most of any rank |" in text
    assert f"| held between steps | {most} 1, the most" in text
    assert "| rank 1, bytes | measured | predicted |" in text
    text = written(summary(tmp_path, RankCost({"x": 4, "y": 3 * MIB}, {"x": 5}, {}, {})))
    assert "| x | 4 | 5 |\n| y | 3,145,728 | - |\n| total | 3,145,732 | 5 |" in text
    assert "| sent in a step | nothing: there is one rank |" in text
    sent = text.partition("## Bytes")[2]
    assert "No bytes: there is no other rank." in sent and "bytes | measured" not in sent


def test_speed_is_that_of_the_steps_made_since_the_run_was_resumed(tmp_path: Path):
    """The steps of another plan do not count."""
    given = summary(tmp_path, RankCost({}, {}, {}, {}))
    slow = [replace(r, tokens_per_s=1.0, mfu=0.9) for r in given.records[:6]]
    fast = [replace(r, mfu=0.5) for r in given.records[6:]]
    text = report_of(replace(given, records=[*slow, *fast], began=6)).text
    assert "| speed | 128 tokens/s (median) |" in text and "| time in steps | 0:04 |" in text
    assert "| MFU | 50.0% of the device's peak |" in text


def test_the_time_of_a_step_stands_beside_its_prediction(tmp_path: Path):
    """Its parts, the median after the warm-up, and the ratio; in the page and as JSON."""
    given = summary(tmp_path, RankCost({}, {}, {}, {}))
    predicted = StepTime(0.3, {"dp": 0.1}, 0.0, 0.05, 64, 1e9, 1e12)
    text = written(replace(given, time=time_cost("h200", predicted, given.records)))
    said = "500.00 ms (median of 5 steps), predicted 450.00 ms for h200: 0.90 of measured"
    assert f"| time of a step | {said} |" in text
    assert "- time of a step: -10.0% predicted over measured" in text
    assert "| exposed dp | 100.00 |" in text and "| measured | 500.00 |" in text
    assert "exposed dp" in (tmp_path / "report.html").read_text()
    told = json.loads((tmp_path / "step_time.json").read_text())
    assert (told["measured_s"], told["predicted"]["compute_s"]) == (0.5, 0.3)
    assert time_cost("h200", predicted, given.records[:3]) is None


def test_a_run_with_a_cluster_is_timed(tmp_path: Path):
    """After the last step; a cluster that cannot be is refused before the first."""
    given = runs.settings(tmp_path / "run", steps=5)
    runs.run(runs.changed(given, "run", cluster="h100-sxm"))
    told = json.loads((given.folder / "step_time.json").read_text())
    assert told["steps"] == 2 and 0 < told["predicted"]["step_s"] < told["measured_s"]
    wrong = runs.changed(given, "run", cluster="h100", folder=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"the cluster 'h100'.*Write instead: h100-sxm"):
        runs.run(wrong)


# --- the page -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run whose name is markup, with its report."""
    given = whole(tmp_path_factory.mktemp("runs") / "a<script>alert(1)<script>")
    assert write(report_of(given), given.config.folder) == []
    return given


@pytest.fixture
def page(run: Summary) -> str:
    return (run.config.folder / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing_and_escapes_text(page: str):
    """No script, no address but its own pictures."""
    links = re.findall(r"""(?:src|href|srcset|action|data)=["']([^"']*)""", page)
    assert links and all(link.startswith("data:") for link in links)
    assert not re.search(r"<script|<iframe|<object|@import|url\(", page)
    assert "default-src 'none'" in page
    assert page.count("a&lt;script&gt;alert(1)&lt;script&gt;") == 2


SECTIONS = ["Loss", "Memory", "Bytes", "Timeline", "Experts", "Plan"]


def test_the_page_and_the_markdown_say_the_same(run: Summary, page: str):
    """Each section, sentence and cell of the one is in the other; the answer comes first."""
    text = report_of(run).text
    assert re.findall(r"<h2>(.*)</h2>", page) == SECTIONS
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    plain = unescape(re.sub("<code>|</code>", "`", page))
    for line in text.replace("\\|", "&").splitlines():
        cells = line.strip("|").split("|") if line.startswith("|") else [line.lstrip("# -")]
        for said in (cell.strip().replace("&", "|").strip("*") for cell in cells):
            assert said in plain or said.startswith(("![", "---"))
    assert page.index("50% below the unigram baseline</strong>") < page.index("<table>")
    for check in ("✓ memory between steps: as predicted", "✓ bytes sent: as predicted"):
        assert check in page
    # every word of the plan is explained, and the default of what no word says
    words = re.findall(r"^\| (`\S*`) \| (.*) \|$", text.partition("## Plan")[2], re.MULTILINE)
    assert " ".join(word for word, _ in words) == "`pp2` `dp2` `ep2` `1f1b:4` `ddp` `zero2`"
    assert words[-1][1].endswith("gradients (only layers head)")


def test_the_end_says_how_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line with both files; without the page if it cannot be made.  A difference is said."""
    given = whole(tmp_path / "run")
    wrong = replace(given.costs[3], predicted_sent=given.costs[3].sent | {"pp send": MIB + 1})
    given = replace(given, costs=[*given.costs[:3], wrong])
    said = io.StringIO()
    training.publish_report(given, Console(file=said, width=300))
    line = f"report: {given.config.folder}/report.md"
    assert f"{line}; open {given.config.folder}/report.html in a browser\n" in said.getvalue()
    assert run_folder.has_report(given.config.folder)
    assert "✗ bytes sent: not as predicted" in (tmp_path / "run/report.html").read_text()

    def broken(*_: object) -> str:
        raise ValueError("no page")

    (given.config.folder / "report.html").unlink()
    monkeypatch.setattr(run_report, "page", broken)
    training.publish_report(given, Console(file=said, width=300))
    assert f"{line}\n" in said.getvalue()
    assert "report.html could not be made (ValueError: no page)" in said.getvalue()


@pytest.mark.full
def test_loads_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    """Nor on a break after two steps, or on a third step in which a data rank has no rows."""

    def moe(name: str, plan: str, steps: int) -> config.Config:
        given = runs.settings(
            tmp_path / name, f"{plan} fp64", batch=8, steps=steps, decay="constant"
        )
        return runs.changed(given, "model", experts=4, gate="topk:1")

    one = runs.run(moe("one", "dp1", 3))
    runs.run(moe("two", "dp2 ep2 zero2", 2), 2)
    two = runs.run(moe("two", "dp2 ep2 zero2", 3), 2, RunStart(resume=True))
    for a, b in zip(one, two, strict=True):
        assert (a.expert_loads, a.dropped) == (b.expert_loads, b.dropped)
        assert (a.loss, a.gate_entropy) == pytest.approx((b.loss, b.gate_entropy), rel=1e-10)
    assert any(record.dropped for record in one)


def used(world: World, folder: str, words: str) -> tuple[list[int], list[int], str]:
    """Bytes that a step reads and writes, by the ledger and by the disk; what is said of it."""
    engine: Any = sw.parallelize(
        torch.nn.Linear(300, 300), f"zero3 fp32 {words}", world, loss=squares, offload_folder=folder
    )
    uses: list[tuple[int, int]] = []
    for _ in range(2 if words else 0):
        engine.step(torch.ones(2, 300))
        engine.disk.sync()
        so_far = engine.disk.use.so_far
        uses.append((so_far.read_bytes, so_far.written_bytes))
    sent = engine.measured_bytes()
    counted = [sent.get(f"tier {way}", 0) for way in ("disk_to_host", "host_to_disk")]
    return counted, [b - a for a, b in zip(*uses, strict=True)], disk_line(engine)


def test_the_disk_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    """The same bytes in a step; rank 0 says the bandwidth of both."""
    (*one, first), (*other, second) = run_gloo(2, used, str(tmp_path), "offload:param@disk")
    assert all(counted == read_and_written for counted, read_and_written in (one, other))
    assert re.match(
        rf"disk .*{tmp_path}.*: 2 ranks read \d+ MiB at \d+ MiB/s and wrote \d+ MiB at \d+ MiB/s; "
        r"they waited \d+\.\d s for it$",
        first,
    )
    assert second == ""
    assert [line for *_, line in run_gloo(2, used, str(tmp_path), "")] == ["", ""]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_every_rank_has_a_profile(tmp_path: Path) -> None:
    """Five steps of each rank: its actions by their names, in the order of its row."""
    given = runs.settings(tmp_path / "run", "pp2 1f1b:2", save_every=0)
    run_gloo(2, runs.trained, runs.changed(given, "run", profile=True))
    for rank in (0, 1):
        text = (given.folder / "profile" / f"rank-{rank}.json").read_text()
        events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "user_annotation"]
        named = [e["name"] for e in sorted(events, key=lambda e: e["ts"])]
        actions = [f"F{rank}.0", f"F{rank}.1", f"B{rank}.0", f"B{rank}.1"]
        assert all(named.count(action) >= 5 for action in actions)  # and evaluations
        assert named.index(actions[0]) < named.index(actions[2])
    report = (given.folder / "report.md").read_text()
    assert "![timeline](timeline.svg)" in report
