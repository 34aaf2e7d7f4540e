"""The findings of all ranks: machines, failures, warnings, text, and the cluster they measured."""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch.cuda import nccl

import shardwise
from shardwise.comm.link_times import slow_ranks
from shardwise.comm.start.rendezvous import host_number
from shardwise.comm.tiers.disk_bandwidth import DiskBandwidth
from shardwise.comm.tiers.host_memory import free_bytes, limit_bytes
from shardwise.comm.torch_links import available_backends
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.doctor.collectives import Fit, Timing
from shardwise.doctor.device_speed import DeviceSpeed, median_device
from shardwise.prediction.cluster import Cluster, CollectiveSpeed, Derating, Device, LinkSpeed
from shardwise.prediction.time.network import Network

GIB: Final = 2**30
_LEAST_S: Final = 1e-7  # of a latency: times that do not grow with the size of a short message
_FREE: Final = LinkSpeed(latency_s=0.0, bytes_per_s=1e15)  # between the ranks of a world of one


@dataclass(frozen=True)
class Gpu:
    """One GPU that PyTorch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """One machine, seen from one process."""

    host: str
    host_number: int
    cores: int
    threads: int  # of torch in this process
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]
    versions: Mapping[str, str]  # which must be equal on all ranks


def look() -> Machine:
    """This rank's machine."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    memory_bytes = limit_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions["shardwise"] = shardwise.__version__
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return Machine(
        host=socket.gethostname(),
        host_number=host_number(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        free_bytes=int(min(memory_bytes, free_bytes())),
        gpus=tuple(Gpu(each.name, each.total_memory) for each in properties),
        backends=available_backends(),
        versions=versions,
    )


@dataclass(frozen=True)
class RankDiagnosis:
    """One rank's results. `checks` has by axis and collective what is wrong, or "". `timings` are
    the same on all ranks; `device` is None if its speed was not measured.
    """

    machine: Machine
    checks: dict[str, dict[str, str]]
    timings: list[Timing]
    pair_s: dict[tuple[int, int], float]
    device: DeviceSpeed | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all ranks."""

    mesh: str
    findings: Sequence[RankDiagnosis]
    disk: DiskBandwidth | None = None

    @property
    def failures(self) -> list[str]:
        """A sentence for each collective with a wrong result."""
        return [
            f"{name} on axis {axis}, rank {rank}: {text}"
            for rank, finding in enumerate(self.findings)
            for axis, checks in finding.checks.items()
            for name, text in checks.items()
            if text
        ]

    @property
    def fits(self) -> list[Fit]:
        return [timing.fit for timing in self.findings[0].timings]

    @property
    def hosts(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, finding in enumerate(self.findings):
            machine = finding.machine
            found.setdefault(machine.host_number or hash(machine.host), []).append(rank)
        return found

    @property
    def warnings(self) -> list[str]:
        return [*self._threads(), *self._versions(), *self._slow()]

    def _threads(self) -> list[str]:
        found: list[str] = []
        for ranks in self.hosts.values():
            machine = self.findings[ranks[0]].machine
            threads = sum(self.findings[rank].machine.threads for rank in ranks)
            each = max(1, machine.cores // len(ranks))
            fewer = f"start at most {machine.cores} ranks here"
            instead = fewer if threads == len(ranks) else f"set OMP_NUM_THREADS={each}"
            if threads > machine.cores:
                found.append(
                    f"{machine.host} has {machine.cores} processor cores for {threads} threads of "
                    f"{len(ranks)} ranks: {instead}"
                )
        return found

    def _versions(self) -> list[str]:
        first = self.findings[0].machine.versions
        other = {r: f.machine for r, f in enumerate(self.findings) if f.machine.versions != first}
        apart = {v for machine in other.values() for v in machine.versions.items() - first.items()}
        said = ", ".join(sorted(map(" ".join, apart))) or "missing"
        ranks = ", ".join(f"{rank} ({machine.host})" for rank, machine in other.items())
        return [f"rank {ranks}: other versions than on rank 0: {said}"] if other else []

    def _slow(self) -> list[str]:
        seconds = {way: s for finding in self.findings for way, s in finding.pair_s.items()}
        named = ", ".join(
            f"{rank} ({self.findings[rank].machine.host}, {times:.1f} times)"
            for rank, times in slow_ranks(seconds).items()
        )
        text = "a slow link: 1 MiB there and back takes so many times as long as between others"
        return [f"rank {named}: {text}"] if named else []

    def object(self) -> dict[str, Any]:
        """What `--json` prints."""
        machines = [asdict(self.findings[ranks[0]].machine) for ranks in self.hosts.values()]
        return {
            "mesh": self.mesh,
            "ranks": len(self.findings),
            "hosts": machines,
            "holds": not self.failures,
            "failures": self.failures,
            "warnings": self.warnings,
            "fits": [asdict(fit) for fit in self.fits],
            "timings": [asdict(timing) for timing in self.findings[0].timings],
            "disk": None if self.disk is None else asdict(self.disk),
        }

    def text(self) -> str:
        """What the command prints."""
        blocks = [*map(self._host, self.hosts.values()), self._table()]
        count = sum(len(checks) for checks in self.findings[0].checks.values())
        right = f"{count} collectives are right on the textbook example on all ranks"
        wrong = [f"{len(self.failures)} results of collectives are wrong", *self.failures]
        blocks.append("\n".join(wrong) if self.failures else right)
        if self.disk is not None:
            blocks.append(self.disk.text)
        blocks += [f"warning: {text}" for text in self.warnings]
        return "\n\n".join(block for block in blocks if block)

    def _host(self, ranks: list[int]) -> str:
        machine = self.findings[ranks[0]].machine
        lines = [
            f"{machine.host}: {machine.cores} cores, {len(ranks)} ranks",
            f"  memory {machine.memory_bytes / GIB:.1f} GiB, {machine.free_bytes / GIB:.1f} free",
            "  backends " + ", ".join(machine.backends),
            "  " + ", ".join(map(" ".join, machine.versions.items())),
        ]
        lines += [
            f"  GPU {i}: {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB"
            for i, gpu in enumerate(machine.gpus)
        ] or ["  no GPU"]
        return "\n".join(lines)

    def _table(self) -> str:
        lines = [f"{'axis':8} {'collective':15} {'latency':>10} {'bandwidth':>12} {'residual':>9}"]
        for fit in self.fits:
            rate = "-" if fit.bytes_per_s is None else f"{fit.bytes_per_s / 2**20:.0f} MiB/s"
            lines.append(
                f"{fit.axis:8} {fit.collective:15} {fit.latency_s * 1e6:7.1f} us {rate:>12} "
                f"{fit.residual:9.1%}"
            )
        return "\n".join(lines) if len(lines) > 1 else "one rank: no link to measure"


def measured_cluster(found: Diagnosis) -> Cluster:
    """The cluster for `predict --cluster FILE`: median devices, links by the lines of `send`."""
    hosts = list(found.hosts.values())
    local = max(map(len, hosts))
    inside, between = _links(found, hosts)
    if inside is None and local > 1:
        given = f"--save on {len(hosts)} hosts with the mesh '{found.mesh}'"
        instead = f"--mesh 'dp{len(hosts)} tp{local}'"
        raise bad(given, "a mesh with an axis within the hosts, and one across them", instead)
    inside = inside or between or _FREE
    speed = median_device([each.device for each in found.findings if each.device is not None])
    cluster = Cluster(
        devices_per_host=local,
        hosts=len(hosts),
        device=_device(found, speed, local),
        inside=inside,
        between=between or inside,
        host_link=LinkSpeed.model_validate(speed.link) if speed.link else None,
        disk_bytes_per_s=None if found.disk is None else found.disk.both_bytes_per_s,
        derating=Derating(products=1.0, memory=1.0, links=1.0),
    )
    network = Network(cluster, Plan.parse(found.mesh), 0)
    collectives = {
        fit.collective: CollectiveSpeed(
            latency=max(_LEAST_S, fit.latency_s) / network.latency_s(fit.axis, fit.collective),
            rate=(fit.bytes_per_s or _FREE.bytes_per_s) / network.rate(fit.axis, fit.collective),
        )
        for fit in reversed(found.fits)  # of several axes the first one counts
    }
    return cluster.model_copy(update={"collectives": collectives})


def _links(found: Diagnosis, hosts: list[list[int]]) -> tuple[LinkSpeed | None, LinkSpeed | None]:
    mesh, host_of = Plan.parse(found.mesh).mesh, {r: n for n, own in enumerate(hosts) for r in own}
    links: dict[bool, LinkSpeed] = {}
    for fit in (fit for fit in found.fits if fit.collective == "send"):
        crosses = len({host_of[rank] for rank in mesh.line(fit.axis, 0)}) > 1
        latency_s, rate = max(_LEAST_S, fit.latency_s), fit.bytes_per_s or _FREE.bytes_per_s
        links.setdefault(crosses, LinkSpeed(latency_s=latency_s, bytes_per_s=rate))
    return links.get(False), links.get(True)


def _device(found: Diagnosis, speed: DeviceSpeed, local: int) -> Device:
    """Ranks on processors share their host's memory."""
    machine = found.findings[0].machine
    gpu = machine.gpus[0] if speed.kind == "cuda" else None
    fields = {
        "name": "cpu" if gpu is None else gpu.name,
        "memory_bytes": machine.memory_bytes // local if gpu is None else gpu.memory_bytes,
        "peak_flops": {name: max(r for _, r in pairs) for name, pairs in speed.products.items()},
        "asynchronous": gpu is not None,
        "products": speed.products,
    }
    return Device.model_validate(fields | speed.figures)
