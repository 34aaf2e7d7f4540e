"""The predicted time of a step: kernels, links, what overlaps, and the bubble of a pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.cli.configured import configured
from shardwise.cli.main import main
from shardwise.cli.predict_command import predict_request
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tape import Operation
from shardwise.models.gpt import GPT, GPTConfig, loss
from shardwise.prediction.cluster import Cluster, Derating
from shardwise.prediction.cluster_presets import PRESETS
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.time.kernel_seconds import operation_s
from shardwise.prediction.time.network import AxisHosts, Network
from shardwise.prediction.time.step_time import RankWork, StepTime
from shardwise.prediction.time.streams import Streams
from shardwise.prediction.traffic import Counted, TrafficLine
from shardwise.verify.oracles.oracles import is_asynchronous
from tests import plans

IDEAL = PRESETS["h100-sxm"].model_copy(
    update={"derating": Derating(products=1.0, memory=1.0, links=1.0)}
)
CONFIG = GPTConfig(512, 6, 64, heads=4, kv_heads=4, hidden=192, sequence=32)


def linked(rate: float, latency_s: float = 0.0) -> Cluster:
    """The ideal cluster with all links at this rate; products alone take time on its devices."""
    speed = IDEAL.inside.model_copy(update={"latency_s": latency_s, "bytes_per_s": rate})
    device = IDEAL.device.model_copy(update={"launch_s": 0.0, "memory_bytes_per_s": 1e30})
    return IDEAL.model_copy(update={"inside": speed, "between": speed, "device": device})


def predicted(plan: str, rows: int = 8) -> Prediction:
    """The prediction for a step of a small GPT."""
    tokens = torch.zeros(rows, CONFIG.sequence, dtype=torch.long)
    batch = {"inputs": tokens, "targets": tokens}
    with torch.device("meta"):
        model = GPT(CONFIG)
    return sw.predict(model, plan, batch, loss=loss, least_unit_bytes=1)


def timed(plan: str, cluster: Cluster | str = IDEAL, rows: int = 8, **options: Any) -> StepTime:
    """The time of a step of a small GPT."""
    return predicted(plan, rows).step_time(cluster, **options)


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "expected"),
    [
        (989 * 10**12, 10, 1.0),
        (10, 335 * 10**10, 1.0),
        (10, 10, IDEAL.device.launch_s),
        (0, 67 * 10**10, 0.2),
    ],
    ids=["by its peak", "by its memory", "by its launch", "without products"],
)
def test_a_kernel_takes_the_longest_of_three(flops: int, moved_bytes: int, expected: float) -> None:
    """FLOPs at the peak, bytes at the memory's bandwidth, or the launch."""
    operation = Operation("", False, "bfloat16", flops, flops, moved_bytes)
    assert operation_s(operation, IDEAL) == pytest.approx(expected)


HOSTS = [
    ("dp8 tp8", "tp", AxisHosts(8, 1, 8)),
    ("dp8 tp8", "dp", AxisHosts(8, 8, 1)),
    ("dp64", "dp", AxisHosts(64, 8, 8)),
    ("pp2 dp4 tp2", "pp", AxisHosts(2, 2, 1)),
    ("pp2 dp4 tp2", "dp", AxisHosts(4, 1, 4)),
    ("dp16 ep8", "ep", AxisHosts(8, 1, 8)),
    ("dp16 ep8", "edp", AxisHosts(2, 2, 1)),
]


@pytest.mark.parametrize(("plan", "axis", "expected"), HOSTS)
def test_ranks_fill_hosts_in_the_order_of_the_mesh(
    plan: str, axis: str, expected: AxisHosts
) -> None:
    """The innermost axis stays inside of a host of eight, the outermost is across hosts."""
    assert Network(IDEAL, Plan.parse(plan), 0).hosts(axis) == expected


def sent(axis: str, kind: str, sent_bytes: int, messages: int = 1) -> Counted:
    """A count of messages."""
    found, line = Counted(), TrafficLine(axis, kind, "")
    found[line], found.messages[line] = sent_bytes, messages
    return found


NVLINK, NETWORK = IDEAL.inside, IDEAL.between
TIMES = [
    ("dp8", "all_gather", 7 * NVLINK.latency_s + 1e9 / NVLINK.bytes_per_s),
    ("dp8", "all_reduce", 14 * NVLINK.latency_s + 1e9 / NVLINK.bytes_per_s),
    (
        "dp64",
        "all_gather",
        7 * NVLINK.latency_s + 7 * NETWORK.latency_s + 1e9 / (8 * NETWORK.bytes_per_s),
    ),
    (
        "dp64",
        "all_reduce",
        14 * NVLINK.latency_s + 6 * NETWORK.latency_s + 1e9 / (8 * NETWORK.bytes_per_s),
    ),
    ("dp16", "send", NETWORK.latency_s + 1e9 / NETWORK.bytes_per_s),
    ("dp16", "all_to_all", NETWORK.latency_s + 8e9 / 15 / NETWORK.bytes_per_s),
]


@pytest.mark.parametrize(("plan", "kind", "expected"), TIMES)
def test_a_collective_takes_its_hops_and_its_bytes(plan: str, kind: str, expected: float) -> None:
    """Rings enter a host by the links of all of its ranks; only some pairs are across hosts."""
    found = Network(IDEAL, Plan.parse(plan), 0).seconds(sent("dp", kind, 10**9))
    assert found == {"dp": pytest.approx(expected)}


def test_a_move_overlaps_until_it_is_waited_for() -> None:
    """Two moves on one axis run one after the other, beside what computes meanwhile."""
    streams = Streams()
    streams.begin({"dp": 2.0})
    ends = streams.begin({"dp": 3.0})
    streams.compute(4.0)
    streams.wait(ends)
    assert (streams.now, streams.exposed_s["dp"]) == (5.0, 1.0)


def test_prefetch_hides_gathers() -> None:
    """Without it, each gather is exposed before its unit computes."""
    hidden, shown = (timed("dp8 zero3 bf16", linked(1e10), prefetch=n) for n in (1, 0))
    assert hidden.compute_s == shown.compute_s
    assert hidden.exposed_s["dp"] < shown.exposed_s["dp"]


def test_a_step_on_fast_links_is_its_compute_and_its_update() -> None:
    """With links of no latency, nothing of the communication is left."""
    found = timed("dp8 zero3 bf16", linked(1e30))
    assert found.seconds == pytest.approx(found.compute_s + found.update_s, rel=1e-9)


def test_exposed_time_is_at_most_that_of_all_messages() -> None:
    """A step on slow links takes at least the time of its messages, and hides some of it."""
    whole = Network(linked(1e9), Plan.parse("dp8"), 0)
    found = timed("dp8 bf16", linked(1e9))
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(CONFIG).parameters())
    sums_s = whole.seconds(sent("dp", "all_reduce", 2 * 2 * numel * 7 // 8))["dp"]
    assert sums_s - found.compute_s < found.exposed_s["dp"] < sums_s * 1.01


def test_a_stage_waits_for_its_gathers() -> None:
    """Under zero3 more is exposed than the sums of zero2, and nothing on fast links."""
    plan = "pp2 dp4 {} 1f1b:2 bf16"
    gathers, sums = (timed(plan.format(row), linked(1e9)) for row in ("zero3", "zero2"))
    assert gathers.exposed_s["dp"] > 1.5 * sums.exposed_s["dp"]
    assert timed(plan.format("zero3"), linked(1e30)).exposed_s.get("dp", 0.0) < 1e-12


@pytest.mark.parametrize("plan", ["dp8 bf16", "dp8 zero3 bf16"])
def test_messages_that_take_the_time_of_the_device_are_exposed(plan: str) -> None:
    """All of them, where processors send; the step is the sum of its kernels and messages."""
    cluster = linked(1e9)
    cluster = cluster.model_copy(
        update={"device": cluster.device.model_copy(update={"overlap": 0.0})}
    )
    assert timed(plan, linked(1e9)).exposed_s["dp"] < timed(plan, cluster).exposed_s["dp"]
    messages_s = sum(predicted(plan).message_seconds(cluster).values())
    assert timed(plan, cluster).exposed_s["dp"] == pytest.approx(messages_s)


def test_a_ring_adds_the_kernels_that_merge_its_blocks() -> None:
    """Of each of 6 attentions, for each block 12 kernels forward and 4 backward."""
    found = predicted("cp4 bf16")
    added = len(RankWork(found, IDEAL).operations) - len(found.spec.run.tape.operations)
    assert added == 6 * 4 * (12 + 4)
    assert timed("cp4 bf16", IDEAL).compute_s > added * IDEAL.device.launch_s


def test_accumulation_sums_gradients_once() -> None:
    """Four microbatches of two rows compute as much as one of eight, and send no more."""
    one, four = timed("dp8 bf16", linked(1e9)), timed("dp8 bf16 accumulate:4", linked(1e9))
    assert four.flops == one.flops and four.tokens == one.tokens
    assert four.exposed_s["dp"] == pytest.approx(one.exposed_s["dp"], rel=0.05)


def test_recomputation_adds_a_forward_pass_of_the_blocks() -> None:
    """Not to the FLOPs of the MFU."""
    plain, again = timed("dp8 bf16"), timed("dp8 bf16 recompute:full")
    assert again.flops == plain.flops
    assert 1.15 * plain.compute_s < again.compute_s < 1.45 * plain.compute_s


def test_tokens_and_mfu_follow_from_the_time() -> None:
    """Tokens of all ranks a second; FLOPs of a rank over what its peak allows."""
    found = timed("dp8 bf16", "h100-sxm")
    assert found.tokens == 8 * 8 * CONFIG.sequence
    assert found.tokens_per_s == found.tokens / found.seconds
    assert found.mfu == pytest.approx(found.flops / found.seconds / 989e12)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp2 zero3 offload:optim@disk fp32", ("offload:optim@disk",)),
        ("dp2 zero3 offload:optim fp32", ()),
        ("dp2 zero3 fp32", ()),
    ],
)
def test_what_is_not_modelled_is_named(plan: str, words: tuple[str, ...]) -> None:
    """The time of copies between tiers is missing, and the result says so."""
    assert timed(plan).unmodelled == words


@pytest.mark.full
def test_every_plan_of_the_table_has_a_time() -> None:
    """Copies between tiers take time; what is on a disk, or updates by its schedule, is named."""
    others = {"recompute:256KiB", "recompute:128KiB", "stages:1,3,1", "stages:2,1,1,1"}  # models
    for text in (text for text in plans.every_plan() if not others.intersection(text.split())):
        plan = Plan.parse(text)
        run = configured(None, text, "moe" if plan.ep > 1 else "gpt")
        found = predict_request(run, None, None, 0).prediction(0)
        step = found.step_time("h100-sxm")
        parts = (step.compute_s, *step.exposed_s.values(), step.bubble_s, step.update_s)
        assert min(parts) >= 0 and step.compute_s and step.tokens, text
        hidden = any(word in text for word in ("@disk", "activations:", "-host"))
        copies = any(line.startswith("tier") for line in found.bytes)
        assert bool(step.unmodelled) == (hidden or is_asynchronous(plan)), (text, step.unmodelled)
        assert ("tier" in step.exposed_s) == copies, text


class Shift(nn.Module):
    """Adds a parameter, so that the first linear layer computes the gradient of its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Layers(nn.Module):
    """Equal layers, and a loss without parameters."""

    def __init__(self) -> None:
        super().__init__()
        linear = (nn.Linear(4096, 4096, bias=False) for _ in range(8))
        self.layers = nn.Sequential(Shift(), *linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("plan", "stages", "bubble"),
    [
        ("pp4 gpipe:8", 4, 3 / 8),
        ("pp4 1f1b:8", 4, 3 / 8),
        ("pp4 interleaved:8x2", 8, 3 / 16),
        ("pp2 1f1b:4", 2, 1 / 4),
    ],
)
def test_the_bubble_of_equal_stages_is_the_papers(plan: str, stages: int, bubble: float) -> None:
    """(p-1)/m of the ideal time, and (p-1)/(v m) with v chunks (arXiv 2104.04473, section 2.2)."""
    with torch.device("meta"):
        model = Layers()
    begin = [f"layers.{n + 1}" for n in range(8 // stages, 8, 8 // stages)]
    found = sw.predict(
        model,
        f"{plan} bf16",
        torch.rand(8 * 1024, 4096, dtype=torch.bfloat16),
        loss=lambda m, x: m(x).sum(),
        stages=begin,
    )
    step = found.step_time(linked(1e30))
    assert step.bubble_s / step.compute_s == pytest.approx(bubble, rel=1e-6)


def test_the_command_prints_the_time_and_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """As a sentence, and with --json as numbers whose parts sum to the step."""
    said: list[str] = []
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main(["predict", "dp16 zero3 bf16", "--model", "gpt:tiny", "--cluster", "h200", *more])
        said.append(capsys.readouterr().out)
    found = json.loads(said[1])["step_time"]
    parts = [found["compute_s"], *found["exposed_s"].values(), found["bubble_s"], found["update_s"]]
    assert found["step_s"] == pytest.approx(sum(parts))
    assert f"A step takes {found['step_s']:.3g} s: compute" in said[0]
    assert f"MFU {found['mfu']:.1%}." in said[0]


TINY = ["--model", "gpt:tiny", "--cluster", "h100-sxm"]


def events(argv: list[str], file: Path) -> list[dict[str, Any]]:
    """The spans of the trace that a command writes."""
    with pytest.raises(SystemExit) as end:
        main(["predict", *argv, *TINY, "--trace", str(file), "--json"])
    assert not end.value.code
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_the_streams_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every gather, use and sum of a unit; the step ends with the update, as predicted."""
    found = events(["dp8 zero3 bf16"], tmp_path / "step.json")
    step_s = json.loads(capsys.readouterr().out)["step_time"]["step_s"]
    assert {event["cat"] for event in found} == {"rank 0 compute", "rank 0 dp"}
    names = {event["name"] for event in found}
    assert {"gather blocks.0", "forward blocks.0", "backward blocks.0", "reduce blocks.0"} <= names
    last = max(found, key=lambda event: event["ts"] + event["dur"])
    assert last["name"] == "update" and last["ts"] + last["dur"] == pytest.approx(1e6 * step_s)


def test_the_trace_of_a_pipeline_has_the_actions_of_its_ranks(tmp_path: Path) -> None:
    """A track for each rank, with the names that a measured trace has; drawn, the same times."""
    found = events(["dp2 pp2 1f1b:2 bf16"], tmp_path / "step.json")
    assert {event["cat"] for event in found} == {"rank 0", "rank 2"}
    assert {"F0.0", "F0.1", "F1.0", "B1.1"} <= {event["name"] for event in found}
    with pytest.raises(SystemExit):
        main(["predict", "pp2 1f1b:2 bf16", *TINY, "--trace", str(tmp_path / "step.svg")])
    assert "ms, bubble " in (tmp_path / "step.svg").read_text()


def test_the_curve_is_that_of_each_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step on 16 ranks is the one that is predicted for them alone; the picture is drawn."""
    said: list[dict[str, Any]] = []
    for argv in (["tp2 zero3 bf16", "--ranks", "4,16", "--svg", str(tmp_path / "c.svg")],
                 ["dp8 tp2 zero3 bf16"]):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["predict", *argv, *TINY, "--json"])
        said.append(json.loads(capsys.readouterr().out))
    curve, alone = said
    assert [row["ranks"] for row in curve["curve"]] == [4, 16]
    assert curve["curve"][1] == {"ranks": 16} | alone["step_time"]
    assert (tmp_path / "c.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["zero3", "--trace", "a.json"], "--trace a.json without --cluster"),
        (["zero3", "--ranks", "8"], "--ranks 8 without --cluster"),
        (["zero3", "--svg", "a.svg", *TINY], "--svg a.svg without --ranks"),
        (["dp2 bf16", "--trace", "a.txt", *TINY], "ends in .json or .svg"),
        (["dp2 bf16", "--trace", "a.svg", *TINY], "Write instead: --trace a.json"),
        (["dp2 bf16", "--trace", "/no/such/a.json", *TINY], "cannot be written"),
        (["zero3 bf16", "--ranks", "8,x", *TINY], "--ranks 8,x"),
        (["bf16", "--ranks", "2", "--svg", "curve", *TINY], "that ends in .svg or .png"),
        (["zero3 bf16", "--ranks", "9" * 5000, *TINY], "Write instead: --ranks 8,64"),
        (["dp2 zero3 bf16", "--ranks", "8", *TINY], "Write instead: 'zero3 bf16'"),
        (["tp2 bf16", "--ranks", "8,9", *TINY], "9"),
        (["bf16", "--ranks", "2", "--svg", "/no/such/a.svg", *TINY], "--svg /no/such/a.svg"),
    ],
)
def test_bad_input_is_one_paragraph(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to write instead, and exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["predict", *argv])
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and text in said
    assert "Write instead:" in said and "\n" not in said
