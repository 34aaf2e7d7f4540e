"""The combined findings of all ranks: failures, warnings and text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.comm.link_times import slow_ranks
from shardwise.comm.tiers.disk_bandwidth import DiskBandwidth
from shardwise.doctor.device_speed import DeviceSpeed
from shardwise.doctor.machine import Machine
from shardwise.doctor.timing import Fit, Timing, fits, slowest

GIB = 2**30


@dataclass(frozen=True)
class RankDiagnosis:
    """The finding of one rank.  `checks` has "" for a correct collective, by axis and name.

    `device` is None if its speed was not measured.
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
        """A line for each wrong result of a collective on a rank."""
        return [
            f"{name} on axis {axis}, rank {rank}: {text}"
            for rank, finding in enumerate(self.findings)
            for axis, checks in finding.checks.items()
            for name, text in checks.items()
            if text
        ]

    @property
    def timings(self) -> list[Timing]:
        """The timings of the slowest ranks."""
        return slowest([finding.timings for finding in self.findings])

    @property
    def fits(self) -> list[Fit]:
        """A line for each axis and collective."""
        return fits(self.timings)

    @property
    def hosts(self) -> dict[int, list[int]]:
        """The ranks of each host; a host without a number is identified by its name."""
        found: dict[int, list[int]] = {}
        for rank, finding in enumerate(self.findings):
            machine = finding.machine
            found.setdefault(machine.host_number or hash(machine.host), []).append(rank)
        return found

    @property
    def warnings(self) -> list[str]:
        """Problems that make a run slow or wrong."""
        return [*self._threads(), *self._versions(), *self._slow(), *self._poor()]

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
        mine = dict(self.findings[0].machine.versions)
        found: list[str] = []
        for rank, finding in enumerate(self.findings):
            theirs = dict(finding.machine.versions)
            different = [
                f"{name} {theirs.get(name, 'missing')} instead of {mine.get(name, 'missing')}"
                for name in dict.fromkeys([*mine, *theirs])
                if mine.get(name) != theirs.get(name)
            ]
            if different:
                host = finding.machine.host
                found.append(f"rank {rank} ({host}) has {', '.join(different)} on rank 0")
        return found

    def _slow(self) -> list[str]:
        seconds = {way: s for finding in self.findings for way, s in finding.pair_s.items()}
        return [
            f"rank {rank} ({self.findings[rank].machine.host}) has a slow link: 1 MiB there "
            f"and back with each partner takes at least {link.times:.1f} times as long as between "
            "others"
            for rank, link in slow_ranks(seconds).items()
        ]

    def _poor(self) -> list[str]:
        return [
            f"{fit.collective} on axis {fit.axis}: its times are {fit.residual:.0%} off the line, "
            "so the machine was busy, or another network is used for long messages"
            for fit in self.fits
            if fit.residual > 0.5
        ]

    def object(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        machines = [asdict(self.findings[ranks[0]].machine) for ranks in self.hosts.values()]
        return {
            "mesh": self.mesh,
            "ranks": len(self.findings),
            "hosts": machines,
            "holds": not self.failures,
            "failures": self.failures,
            "warnings": self.warnings,
            "fits": [asdict(fit) for fit in self.fits],
            "timings": [asdict(timing) for timing in self.timings],
            "disk": None if self.disk is None else asdict(self.disk),
        }

    def text(self) -> str:
        """The output of the command."""
        blocks = [*map(self._host, self.hosts.values()), self._table()]
        count = sum(len(checks) for checks in self.findings[0].checks.values())
        wrong = len(self.failures)
        blocks.append(
            "\n".join([f"{wrong} results of collectives are wrong", *self.failures])
            if wrong
            else f"{count} collectives are right on the textbook example on all ranks"
        )
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
            "  " + ", ".join(f"{name} {version}" for name, version in machine.versions),
        ]
        lines += [
            f"  GPU {i}: {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB"
            for i, gpu in enumerate(machine.gpus)
        ] or ["  no GPU"]
        if machine.links:
            lines.append("  links " + "".join(f"{f'GPU{i}':>6}" for i in range(len(machine.links))))
            lines += [
                f"  GPU{i:<3}" + "".join(f"{link:>6}" for link in row)
                for i, row in enumerate(machine.links)
            ]
        elif machine.gpus:
            lines.append("  links unknown: install nvidia-ml-py")
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
