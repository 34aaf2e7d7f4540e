"""`shardwise doctor`: what it checks, measures, warns of and saves."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.doctor import examine
from shardwise.comm import move
from shardwise.comm.link_times import PAIR_ELEMENTS
from shardwise.comm.tiers import disk_bandwidth
from shardwise.comm.world import Axis, World, alone
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from shardwise.core.plan.plan import Plan
from shardwise.core.tally import Key, Tally
from shardwise.doctor import collectives, device_speed
from shardwise.doctor.collectives import COLLECTIVES, Timing
from shardwise.doctor.device_speed import DeviceSpeed
from shardwise.doctor.diagnosis import Diagnosis, RankDiagnosis, look, measured_cluster
from shardwise.prediction.prediction import Operation
from shardwise.prediction.time.network import Network, operation_s
from tests.pool import run_gloo, run_threads
from tests.train.runs import ended, printed


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "broadcast"])
def test_a_collective_that_does_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each returns what the rank had, which is wrong on a rank that is named; others are right."""
    idle = COLLECTIVES[name]._replace(run=lambda x, _: x)
    monkeypatch.setitem(COLLECTIVES, name, idle)

    def checked(world: World) -> RankDiagnosis:
        (axis,) = world.on(Mesh.parse("dp3")).axes
        return RankDiagnosis(look(), {"dp": collectives.check(axis, world.device)}, [], {})

    wrong = Diagnosis("dp3", run_threads(3, checked)).failures
    assert wrong and all(text.startswith(f"{name} on axis dp, rank ") for text in wrong)
    assert all(" instead of [" in text for text in wrong)


def test_a_line_is_found_again():
    """Latency + bytes / bandwidth gives both back; neither is ever negative."""
    sizes = [2**power for power in range(10, 24, 2)]
    found = Timing("dp", "send", sizes, [3e-5 + size / 2e9 for size in sizes]).fit
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((3e-5, 2e9))
    assert found.residual == pytest.approx(0, abs=1e-9)
    sizes = [10, 100, 1000]
    faster = Timing("dp", "send", sizes, [(size / 1e6) ** 2 for size in sizes]).fit
    assert faster.latency_s == 0.0 and faster.bytes_per_s is not None
    falling = Timing("dp", "send", sizes, [1e-3 - size / 1e7 for size in sizes]).fit
    assert falling.bytes_per_s is None and falling.latency_s == pytest.approx(1e-3, rel=0.1)
    assert falling.seconds(1e9) == falling.latency_s


def test_a_rank_whose_sends_are_slow_is_named_by_the_whole_examination(
    monkeypatch: pytest.MonkeyPatch,
):
    """Rank 2 of 4 waits 50 ms before each of its messages of 1 MiB; no other rank is named."""
    begin = move.begin_send

    def late(x: torch.Tensor, axis: Axis, to: int) -> Any:
        if axis.rank == 2 and x.numel() == PAIR_ELEMENTS:
            time.sleep(0.05)
        return begin(x, axis, to)

    monkeypatch.setattr(move, "begin_send", late)
    mesh = Mesh.parse("dp4")
    found = run_threads(4, lambda world: examine(world, mesh, 4096))
    (slow,) = (text for text in Diagnosis("dp4", found).warnings if "slow link" in text)
    assert slow.startswith("rank 2 (")


def test_what_will_hurt_is_a_warning():
    """Threads beyond the cores, another version, a slow link with its rank; two cannot tell it."""
    machine = replace(look(), cores=2, threads=2, host="node", host_number=7)
    older = replace(machine, versions={**machine.versions, "torch": "2.0.0"})
    ways = [(0, 1), (1, 2), (0, 2), (0, 3), (2, 3)]
    times = {way: 9e-3 if 3 in way else 1e-3 for way in ways}
    ranks = [RankDiagnosis(m, {}, [], times) for m in (machine, machine, machine, older)]
    threads, version, slow = Diagnosis("dp4", ranks).warnings
    assert "2 processor cores for 8 threads of 4 ranks: set OMP_NUM_THREADS=1" in threads
    assert version == "rank 3 (node): other versions than on rank 0: torch 2.0.0"
    assert slow.startswith("rank 3 (node, 9.0 times): a slow link")
    one = replace(machine, threads=1)
    assert Diagnosis("dp2", [RankDiagnosis(one, {}, [], {(0, 1): 1.0})] * 2).warnings == []


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path):
    """Rates above zero, and no file stays; too little room is named before anything is written."""
    with pytest.raises(InputError, match="MiB free"):
        disk_bandwidth.measure(tmp_path, 2**62)
    found = disk_bandwidth.measure(tmp_path, 2**16)
    assert min(found.write_bytes_per_s, found.read_bytes_per_s, found.both_bytes_per_s) > 0
    assert "chunks of 1024 KiB, 4 threads" in found.text
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def four() -> Diagnosis:
    return Diagnosis("dp2 tp2", run_gloo(4, examine, Mesh.parse("dp2 tp2"), 2**14))


def test_four_processes_are_examined(four: Diagnosis):
    """Every collective is right; there is a line for each collective and axis; bytes are known."""
    assert four.failures == []
    lines = [(one.axis, one.collective) for one in four.fits]
    assert lines == [(axis, name) for axis in ("dp", "tp") for name in COLLECTIVES]
    sent = {t.collective: t.sent_bytes[-1] for t in four.findings[0].timings if t.axis == "dp"}
    assert sent["send"] == 2**14 and sent["all_reduce"] == 2 * 2**14 // 2
    assert "12 collectives are right" in four.text()


FIGURES = {"memory_bytes_per_s": 3e10, "launch_s": 6e-6, "step_s": 1e-3, "overlap": 0.2}
SPEED = DeviceSpeed("cpu", {"fp32": [(1e6, 5e9), (1e8, 9e10)]}, FIGURES, {})


def with_speed(found: Diagnosis) -> Diagnosis:
    ranks = [replace(each, device=SPEED) for each in found.findings]
    return replace(found, findings=ranks, disk=disk_bandwidth.DiskBandwidth("/", 1e8, 2e9, 3e8))


def test_a_measured_cluster_gives_its_measurements_back(four: Diagnosis):
    """The line of each collective on the first axis, the rates of products, nothing derated."""
    found = measured_cluster(with_speed(four))
    network = Network(found, Plan.parse("dp2 tp2"), 0)
    for line in four.fits[: len(COLLECTIVES)]:
        message = {Key(line.axis, line.collective, ""): Tally(calls=1, sent_bytes=10**6)}
        assert sum(network.seconds(message).values()) == pytest.approx(
            line.seconds(10**6), rel=1e-3, abs=1e-6
        )
    assert found.flops_per_s("fp32", 1e6) == 5e9 and found.flops_per_s("fp32") == 9e10
    assert found.flops_per_s("fp32", 5.05e7) == pytest.approx(4.75e10, rel=0.01)
    assert found.bytes_per_s == 3e10
    product = Operation("float32", 10**8, 10**8, 0)
    assert operation_s(product, found) == pytest.approx(1e8 / 9e10 + 6e-6)
    with pytest.raises(InputError, match="plan of 8 ranks, with a cluster that was measured on 4"):
        Network(found, Plan.parse("dp8"), 0)


def test_hosts_without_a_link_inside_are_refused(four: Diagnosis):
    """The mesh to measure has an axis within hosts."""
    found = with_speed(four).findings
    hosts = (1, 2, 2, 1)
    ranks = [
        replace(each, machine=replace(each.machine, host_number=host))
        for each, host in zip(found, hosts, strict=True)
    ]
    with pytest.raises(InputError, match="Write instead: --mesh 'dp2 tp2'"):
        measured_cluster(replace(four, findings=ranks))


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch):
    """On a world of one: rates of products by their FLOPs, and no link."""
    monkeypatch.setattr(device_speed, "ROUND_S", 0.0)
    monkeypatch.setattr(device_speed, "PRODUCTS", {"cpu": (8, 16)})
    monkeypatch.setattr(device_speed, "ELEMENTS", {"cpu": 2**10})
    found = device_speed.measure_device(alone())
    assert [flops for flops, _ in found.products["bf16"]] == [2 * 8**3, 2 * 16**3]
    assert min(rate for pairs in found.products.values() for _, rate in pairs) > 0
    assert min(found.figures.values()) >= 0 and found.figures["overlap"] == 1.0 and not found.link


def test_the_command_prints_and_saves(
    four: Diagnosis, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Exit code 0, one JSON object, and the file that `predict --cluster` reads."""
    monkeypatch.setattr("shardwise.cli.doctor.spawn", lambda *_: with_speed(four).findings)
    toml, asked = tmp_path / "cluster.toml", ("doctor", "--mesh", "dp2 tp2")
    found = json.loads(printed(capsys, *asked, "--json", "--save", str(toml)))
    assert found["ranks"] == 4 and found["mesh"] == "dp2 tp2" and found["holds"]
    told = json.loads(
        printed(capsys, "predict", "dp2 zero3 fp32", "--cluster", str(toml), "--json")
    )
    assert told["step_time"]["update_s"] > FIGURES["step_s"]
    assert set(told["seconds"]) == set(told["bytes"])
    code, _, err = ended(capsys, *asked, "--save", "/dev/full")
    assert code == 2 and "--save /dev/full, which cannot be written (No space" in err
