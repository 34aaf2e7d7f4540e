"""The predicted time of a step: kernels, links, what overlaps, bubbles, and files of clusters."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_request
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.tally import Key, Tally
from shardwise.models.gpt import GPT, GPTConfig, loss
from shardwise.prediction.cluster import PRESETS, Cluster, Derating, cluster_of
from shardwise.prediction.prediction import Operation, Prediction
from shardwise.prediction.time.network import AxisHosts, Network, operation_s
from shardwise.prediction.time.step_time import StepTime
from shardwise.prediction.time.streams import Streams
from tests import plans

IDEAL = PRESETS["h100-sxm"].model_copy(
    update={"derating": Derating(products=1.0, memory=1.0, links=1.0)}
)
CONFIG = GPTConfig(512, 4, 64, heads=4, kv_heads=4, intermediate_size=192, sequence=32)


def linked(rate: float, **device: Any) -> Cluster:
    """The ideal cluster with all links at this rate; products alone take time on its devices."""
    speed = IDEAL.inside.model_copy(update={"latency_s": 0.0, "bytes_per_s": rate})
    own = {"launch_s": 0.0, "overlap": 1.0, "memory_bytes_per_s": 1e30, **device}
    parts = {"device": IDEAL.device.model_copy(update=own), "inside": speed, "between": speed}
    return IDEAL.model_copy(update=parts)


def predicted(plan: str, config: GPTConfig = CONFIG, rows: int = 8, **options: Any) -> Prediction:
    tokens = torch.zeros(rows, config.sequence, dtype=torch.long)
    with torch.device("meta"):
        model = GPT(config)
    batch = {"inputs": tokens, "targets": tokens}
    return sw.predict(model, plan, batch, loss=loss, least_unit_bytes=1, **options)


def timed(plan: str, cluster: Cluster | str = IDEAL, **options: Any) -> StepTime:
    return predicted(plan, **options).step_time(cluster)


# --- kernels --------------------------------------------------------------------------------------


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
def test_a_kernel_takes_the_longest_of_three(flops: int, moved_bytes: int, expected: float):
    """FLOPs at the peak, bytes at the memory's bandwidth, or the launch."""
    operation = Operation("bfloat16", flops, flops, moved_bytes)
    assert operation_s(operation, IDEAL) == pytest.approx(expected)


SMALL = GPTConfig(96, 2, 32, heads=4, kv_heads=4, intermediate_size=64, sequence=16)


def recorded(plan: str, config: GPTConfig = SMALL, device: Any = "cpu") -> list[Operation]:
    """The kernels of the passes of a GPT over three rows."""
    issued = predicted(plan, config, 3, device=device).dry_step.issued
    return [each for each in issued if isinstance(each, Operation)]


def test_flops_are_those_of_a_run():
    """As torch counts a step of one process; ranks of a tensor axis share them; causal is half.
    Torch does not count the attention of a CPU, whose backward pass has five products.
    """
    tokens = torch.zeros(3, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss(GPT(SMALL), {"inputs": tokens, "targets": tokens}).backward()
    operations = recorded("dp2 zero3")
    found = sum(each.flops for each in operations)
    attention = 2 * 2 * tokens.numel() * SMALL.sequence * SMALL.hidden_size
    assert found - SMALL.layers * attention * 7 // 2 == counter.get_total_flops()
    assert 2 * sum(each.flops for each in recorded("dp2 tp2")) == found
    short = [each for each in operations if each.done_flops != each.flops]
    assert len(short) == 2 * SMALL.layers
    assert all(each.done_flops == each.flops // 2 for each in short)


def test_a_fused_norm_passes_over_memory_once():
    """A CPU reads and writes the stream in several operations, the kernel of a GPU in one."""

    def moved(device: str) -> int:
        found = recorded("dp2 bf16", device=device)
        return sum(each.moved_bytes for each in found if not each.backward)

    stream_bytes, norms = 3 * SMALL.sequence * SMALL.hidden_size * 2, 2 * SMALL.layers + 1
    assert moved("cpu") - moved("cuda") >= 2 * norms * stream_bytes


# --- links ----------------------------------------------------------------------------------------

HOSTS = [
    ("dp8 tp8", "tp", AxisHosts(8, 1, 8)),
    ("dp8 tp8", "dp", AxisHosts(8, 8, 1)),
    ("dp64", "dp", AxisHosts(64, 8, 8)),
    ("pp2 dp4 tp2", "pp", AxisHosts(2, 2, 1)),
    ("dp16 ep8", "ep", AxisHosts(8, 1, 8)),
    ("dp16 ep8", "edp", AxisHosts(2, 2, 1)),
]


@pytest.mark.parametrize(("plan", "axis", "expected"), HOSTS)
def test_ranks_fill_hosts_in_the_order_of_the_mesh(plan: str, axis: str, expected: AxisHosts):
    """The innermost axis stays inside of a host of eight, the outermost is across hosts."""
    assert Network(IDEAL, Plan.parse(plan), 0).hosts(axis) == expected


def sent(axis: str, kind: str, sent_bytes: int) -> dict[Key, Tally]:
    return {Key(axis, kind, ""): Tally(calls=1, sent_bytes=sent_bytes)}


#: Plan, collective, messages inside a host and between hosts, and seconds of its bytes.
NEAR, FAR = IDEAL.inside.bytes_per_s, IDEAL.between.bytes_per_s
TIMES = [
    ("dp8", "all_gather", 7, 0, 1e9 / NEAR),
    ("dp8", "all_reduce", 14, 0, 1e9 / NEAR),
    ("dp64", "all_gather", 7, 7, 1e9 / (8 * FAR)),
    ("dp64", "all_reduce", 14, 6, 1e9 / (8 * FAR)),
    ("dp16", "send", 0, 1, 1e9 / FAR),
    ("dp16", "all_to_all", 0, 1, 8e9 / 15 / FAR),
]


@pytest.mark.parametrize(("plan", "kind", "inside", "between", "bytes_s"), TIMES)
def test_a_collective_takes_its_hops_and_its_bytes(
    plan: str, kind: str, inside: int, between: int, bytes_s: float
):
    """Rings enter a host by the links of all of its ranks; only some pairs are across hosts."""
    found = Network(IDEAL, Plan.parse(plan), 0).seconds(sent("dp", kind, 10**9))
    hops_s = inside * IDEAL.inside.latency_s + between * IDEAL.between.latency_s
    assert found == {("dp", kind): pytest.approx(hops_s + bytes_s)}


# --- a step ---------------------------------------------------------------------------------------


def test_a_move_overlaps_until_it_is_waited_for():
    """Two moves on one axis run one after the other, beside what computes meanwhile."""
    streams = Streams()
    streams.begin("dp", 2.0)
    end = streams.begin("dp", 3.0)
    streams.compute(4.0)
    streams.wait(*end)
    assert (streams.now, streams.exposed_s["dp"]) == (5.0, 1.0)


def test_prefetch_hides_gathers():
    """Without it each gather is exposed before its unit; fast links leave compute and update."""
    hidden, shown = (timed("dp8 zero3 bf16", linked(1e10), prefetch=n) for n in (1, 0))
    assert hidden.compute_s == shown.compute_s
    assert hidden.exposed_s["dp"] < shown.exposed_s["dp"]
    found = timed("dp8 zero3 bf16", linked(1e30))
    assert found.seconds == pytest.approx(found.compute_s + found.update_s, rel=1e-9)


def test_a_stage_waits_for_its_gathers():
    """Under zero3 more is exposed than the sums of zero2, and nothing on fast links."""
    plan = "pp2 dp4 {} 1f1b:2 bf16"
    gathers, sums = (timed(plan.format(row), linked(1e9)) for row in ("zero3", "zero2"))
    assert gathers.exposed_s["dp"] > 1.5 * sums.exposed_s["dp"]
    assert timed(plan.format("zero3"), linked(1e30)).exposed_s.get("dp", 0.0) < 1e-12


@pytest.mark.parametrize("plan", ["dp8 bf16", "dp8 zero3 bf16"])
def test_messages_that_take_the_time_of_the_device_are_exposed(plan: str):
    """All of them, where processors send; else some are hidden, at most as long as it computes."""
    cluster = linked(1e9, overlap=0.0)
    found = predicted(plan)
    messages_s = sum(found.message_seconds(cluster).values())
    assert found.step_time(cluster).exposed_s["dp"] == pytest.approx(messages_s)
    hiding = found.step_time(linked(1e9))
    busy_s = hiding.compute_s + hiding.update_s
    assert messages_s - busy_s < hiding.exposed_s["dp"] < messages_s


def test_a_ring_adds_the_kernels_that_merge_its_blocks():
    """Of each of 4 attentions, for each block 12 kernels forward and 4 backward."""
    added = len(recorded("cp4 bf16", CONFIG)) - len(recorded("dp4 bf16", CONFIG))
    assert added >= CONFIG.layers * 4 * (12 + 4)


def test_accumulation_and_recomputation():
    """Four microbatches compute and send as much as one; a second forward is not in the MFU."""
    one, four = timed("dp8 bf16", linked(1e9)), timed("dp8 bf16 accumulate:4", linked(1e9))
    assert four.flops == one.flops and four.tokens == one.tokens
    assert four.exposed_s["dp"] == pytest.approx(one.exposed_s["dp"], rel=0.05)
    plain, again = timed("dp8 bf16"), timed("dp8 bf16 recompute:full")
    assert again.flops == plain.flops
    assert 1.15 * plain.compute_s < again.compute_s < 1.45 * plain.compute_s


def test_tokens_and_mfu_follow_from_the_time():
    """Tokens of all ranks a second; FLOPs of a rank over what its peak allows."""
    found = timed("dp8 bf16", "h100-sxm")
    assert found.tokens == 8 * 8 * CONFIG.sequence
    assert found.tokens_per_s == found.tokens / found.seconds
    assert found.mfu == pytest.approx(found.flops / found.seconds / 989e12)


@pytest.mark.parametrize("plan", ["optim", "optim@disk", "optim-delayed=1"])
def test_updates_elsewhere_take_the_time_of_their_memory(plan: str):
    """Where the cluster has no rate of a tier, the time is missing, and the result says so."""
    found = predicted(f"dp2 zero3 offload:{plan} fp32")
    slow = IDEAL.model_copy(update={"host_bytes_per_s": 1e6, "disk_bytes_per_s": 1e6})
    bytes_of = found.memory_by_tier
    steps = [found.step_time(each) for each in (IDEAL, slow)]
    unknown = IDEAL.model_copy(update={"host_bytes_per_s": None})
    assert found.step_time(unknown).unmodelled == (f"offload:{plan}",)
    assert [bool(step.unmodelled) for step in steps] == ["@disk" in plan, False]
    where = "on disk" if "@disk" in plan else "on the host"
    own = 2 * bytes_of[f"optimizer {where}"] + bytes_of[f"gradients {where}"]
    own = max(own, sum(n for kind, n in found.bytes.items() if "disk" in kind))
    assert steps[1].update_s == pytest.approx(own / 1e6, rel=0.01)


#: Words that ask for other models.
OTHERS = {"recompute:256KiB", "recompute:128KiB", "stages:1,3,1", "stages:2,1,1,1"}


@pytest.mark.full
@pytest.mark.parametrize("text", [p for p in plans.every_plan() if not OTHERS & {*p.split()}])
def test_every_plan_of_the_table_has_a_time(text: str):
    """Copies between tiers take time; what is on a disk of unknown speed is named."""
    plan = Plan.parse(text)
    run = configured(None, text, "moe" if plan.ep > 1 else "gpt")
    found = predict_request(run, None, None, 0).prediction(0)
    step = found.step_time("h100-sxm")
    parts = (step.compute_s, *step.exposed_s.values(), step.bubble_s, step.update_s)
    assert min(parts) >= 0 and step.compute_s and step.tokens
    copies = any(line.startswith("tier") for line in found.bytes)
    assert bool(step.unmodelled) == ("@disk" in text)
    assert copies or "tier" not in step.exposed_s


class Shift(nn.Module):
    """Adds a parameter, so that the first linear layer computes the gradient of its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@pytest.mark.parametrize(
    ("plan", "stages", "bubble"),
    [
        ("pp4 gpipe:8", 4, 3 / 8),
        ("pp4 1f1b:8", 4, 3 / 8),
        ("pp4 interleaved:8x2", 8, 3 / 16),
        ("pp2 1f1b:4", 2, 1 / 4),
    ],
)
def test_the_bubble_of_equal_stages_is_the_papers(plan: str, stages: int, bubble: float):
    """(p-1)/m of the ideal time, (p-1)/(v m) with v chunks (arXiv 2104.04473, 2.2), and hops."""
    with torch.device("meta"):
        layers = (nn.Linear(4096, 4096, bias=False) for _ in range(8))
        model = nn.Sequential(Shift(), *layers)
    begin = [f"{n + 1}" for n in range(8 // stages, 8, 8 // stages)]
    x = torch.rand(8 * 1024, 4096, dtype=torch.bfloat16)
    found = sw.predict(model, f"{plan} bf16", x, loss=lambda m, x: m(x).sum(), stages=begin)
    step, slow = (found.step_time(linked(rate)) for rate in (1e30, 1e12))
    assert step.bubble_s / step.compute_s == pytest.approx(bubble, rel=1e-6)
    hops_s = 2 * (found.plan.size - 1) * x.nbytes / found.plan.microbatches / 1e12
    assert slow.bubble_s - step.bubble_s > 0.99 * hops_s


# --- files of clusters ----------------------------------------------------------------------------


def text_of(cluster: Cluster) -> str:
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back(name: str, tmp_path: Path):
    """The text of a cluster is the file of the same cluster."""
    file = tmp_path / "cluster.toml"
    file.write_text(text_of(PRESETS[name]))
    assert cluster_of(file) == cluster_of(name) == PRESETS[name]


NUMBER = "devices_per_host = 8"
BETWEEN = "[between]\nlatency_s = 4e-06\nbytes_per_s = 50000000000.0\n"
WRONG = [
    (NUMBER, "devices_per_host = 0", "= 0. Allowed: greater than 0. Write instead: devices_per_"),
    ("launch_s", "launch_ms", "unknown key device.launch_ms of a clu.*Write instead: launch_s"),
    (BETWEEN, "", "a cluster without between.*Write instead: .between. with latency_s, bytes_per"),
    (NUMBER, "devices_per_host = " + "[" * 5000, "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_wrong_file_is_explained(old: str, new: str, said: str, tmp_path: Path):
    """In one paragraph for each problem: what was given, what is allowed, and what to write."""
    text, file = text_of(PRESETS["h100-sxm"]), tmp_path / "cluster.toml"
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=said):
        cluster_of(file)


def test_what_a_cluster_lacks_is_said(tmp_path: Path):
    """A precision without a peak; an empty section."""
    (tmp_path / "c.toml").write_text("collectives = 5")
    with pytest.raises(
        InputError, match=r"collectives = 5\. .* Write instead: collectives = \{\},"
    ):
        cluster_of(tmp_path / "c.toml")
    with pytest.raises(InputError, match=r"peak_flops\.int8"):
        PRESETS["a100-80gb"].flops_per_s("int8")
