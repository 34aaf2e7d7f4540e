"""The soak: runs under a seeded schedule of faults end in the undisturbed curve.

    python -m tests.soak --minutes 10 --seed 0          or: make soak ARGS="--minutes 10"

Each run is trained to its end, however often it is disturbed:

    kill       a rank is killed, and the run is started again
    stop       a rank is stopped by SIGSTOP, and must be found within seconds
    launcher   the launcher is killed, and its ranks must end
    signal     the launcher gets SIGTERM, and the run is saved
    world      the same, and the run goes on with another number of ranks
    damage     the same, and a byte of the newest checkpoint changes: it must be named, not loaded
    disk       the disk is full for a while (a folder in memory of its own, where it may be mounted)

At the end of a run its losses are compared with those of one undisturbed process, to 1e-10 in fp64,
and descriptors, threads and memory must be flat. `--steps 100000` trains the smallest model for so
many steps instead.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.folder import CHECKPOINTS, all_in
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import alone, init
from shardwise.train import config, loop
from shardwise.train.metrics import read
from tests.train import runs

PROGRAM = str(Path(__file__).with_name("soak_run.py"))
STEPS, SAVE_EVERY, PAUSE_S = 60, 5, 0.02
#: The name of the folder whose disk is small.
SMALL = "small"
#: After a fault, a program that has not ended after this time hangs.
PATIENCE_S = 120.0
#: The lines of vital signs of each process of `flat`.
LINES = 100


@dataclass(frozen=True)
class Job:
    """What is trained: the plan, the sizes of its mixture if it has one, the numbers of ranks."""

    plan: str
    worlds: tuple[str, ...]
    model: tuple[tuple[str, int], ...] = ()


JOBS = (
    Job("zero3 fp64", ("2", "3")),
    Job("zero1 accumulate:2 fp64", ("1", "2")),
    Job("ep2 zero2 fp64", ("2", "4"), (("experts", 4), ("experts_per_token", 2))),
)


class Soaked:
    """One run under faults: `random` chooses them; `found` counts them; `said`: what went wrong."""

    def __init__(self, folder: Path, job: Job, chance: random.Random) -> None:
        self.folder, self.job, self.random = folder, job, chance
        self.found, self.said = Counter[str](), list[str]()
        self.file, self.vitals = folder / "config.toml", folder / "vitals.jsonl"
        self.given = settings(folder / SMALL / "run", job)
        self.file.write_text(config.dump(self.given))
        self.world = chance.choice(job.worlds)
        self.errors = ""

    @contextmanager
    def program(self) -> Iterator["subprocess.Popen[str]"]:
        """The command, until its end; nothing of it is left afterwards."""
        variables = {"VITALS": str(self.vitals), "PAUSE_S": str(PAUSE_S), "SHARDWISE_FROZEN_S": "2"}
        argv = [sys.executable, PROGRAM, "train", str(self.file), "--resume", "auto"]
        log = (self.folder / "errors").open("w+")
        with (
            log,
            subprocess.Popen(
                [*argv, "--nproc", self.world],
                env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
            ) as started,
        ):
            try:
                yield started
            finally:
                started.kill()
                for pid in self.ranks().values():
                    signalled(pid, signal.SIGKILL)
        self.errors = (self.folder / "errors").read_text()

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that have made a step last, by rank."""
        lines = self.vitals.read_text().splitlines() if self.vitals.exists() else []
        return {line["rank"]: line["pid"] for line in map(json.loads, lines[-16:])}

    def train(self) -> None:
        """Start the command again and again, each time with a fault, until the run has ended."""
        for _ in range(50):
            fault = self.random.choice([None, *FAULTS])
            with self.program() as started:
                if self.steps_more(started) and fault is not None:
                    self.found[fault.__name__] += 1
                    fault(self, started)
                self.end(started)
            if started.returncode == 0 and len(read(self.given.folder)) == STEPS:
                return
            if started.returncode == 2:
                self.remove_named()
        self.said.append("50 starts did not end the run")

    def steps_more(self, started: "subprocess.Popen[str]") -> bool:
        """Wait until some more steps have been made; False if the program has ended before."""
        size = self.vitals.stat().st_size if self.vitals.exists() else 0
        more = 300 * self.random.randrange(1, 20)
        deadline = time.monotonic() + PATIENCE_S
        while started.poll() is None and time.monotonic() < deadline:
            if self.vitals.exists() and self.vitals.stat().st_size > size + more:
                return True
            time.sleep(0.02)
        return False

    def end(self, started: "subprocess.Popen[str]") -> None:
        """Wait for the program; what does not end by itself hangs."""
        try:
            started.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.said.append(f"a hang under {dict(self.found)}")

    def remove_named(self) -> None:
        """Remove the checkpoint that an error names, as the error says."""
        newest = max(all_in(self.given.folder / CHECKPOINTS), default=None)
        if newest is None or str(newest) not in self.errors:
            self.said.append(f"exit code 2, and no checkpoint is named: {self.errors[-500:]}")
            return
        shutil.rmtree(newest)

    def judge(self, losses: list[float]) -> None:
        """Compare the curve with the undisturbed one, and the vital signs of each process."""
        found = [record.loss for record in read(self.given.folder)]
        same = len(found) == len(losses) and all(
            math.isclose(a, b, rel_tol=1e-10) for a, b in zip(found, losses, strict=True)
        )
        if not same:
            self.said.append(f"another curve: {found[-3:]} instead of {losses[-3:]}")
        lines = [json.loads(line) for line in self.vitals.read_text().splitlines()]
        for pid in {line["pid"] for line in lines}:
            own = [line for line in lines if line["pid"] == pid]
            self.said += not_flat(own) if len(own) > 20 else []


def signalled(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- faults ----------------------------------------------------------------------------------


def kill(run: Soaked, _: Any) -> None:
    signalled(run.random.choice(list(run.ranks().values())), signal.SIGKILL)


def stop(run: Soaked, _: Any) -> None:
    signalled(run.random.choice(list(run.ranks().values())), signal.SIGSTOP)


def launcher(_: Soaked, started: "subprocess.Popen[str]") -> None:
    started.kill()


def save(run: Soaked, started: "subprocess.Popen[str]") -> None:
    started.terminate()
    run.end(started)


def world(run: Soaked, started: "subprocess.Popen[str]") -> None:
    save(run, started)
    run.world = run.random.choice(run.job.worlds)


def damage(run: Soaked, started: "subprocess.Popen[str]") -> None:
    save(run, started)
    newest = max(all_in(run.given.folder / CHECKPOINTS), default=None)
    if newest is not None:
        file = run.random.choice([path for path in sorted(newest.iterdir()) if path.is_file()])
        content = bytearray(file.read_bytes())
        content[run.random.randrange(len(content))] ^= 1 << run.random.randrange(8)
        file.write_bytes(content)


def disk(run: Soaked, started: "subprocess.Popen[str]") -> None:
    """Fill the disk that has the run, until the program ends; only one of its own."""
    if not (run.folder / SMALL).is_mount():
        return
    full = run.folder / SMALL / "full"
    with full.open("wb") as file:
        while started.poll() is None:
            try:
                file.write(bytes(2**16))
                file.flush()
            except OSError:
                time.sleep(0.05)
                break
    run.end(started)
    full.unlink()


FAULTS: tuple[Callable[[Soaked, Any], None], ...] = (
    *(kill, stop, launcher, save, world, damage, disk),
)


# --- the command -----------------------------------------------------------------------------


def settings(folder: Path, job: Job) -> config.Config:
    """The configuration of a job, with checkpoints so often that faults meet their writing."""
    small = runs.settings(folder, job.plan, steps=STEPS, batch=8, save_every=SAVE_EVERY, keep=3)
    found = small.model_dump()
    found["model"] |= dict(job.model)
    return config.build(found)


def undisturbed(folder: Path, job: Job) -> list[float]:
    """The losses of the same run in this process, alone."""
    given = settings(folder / "alone", Job(" ".join(job.plan.split()[-1:]), (), job.model))
    loop.train(given, alone("cpu"))
    return [record.loss for record in read(given.folder)]


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder with one in it that has a disk of its own, of 64 MiB, where one may be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, SMALL)
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "soak", str(small)]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield Path(folder)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(small)], check=False)


def soak(minutes: float, seed: int) -> int:
    """Run until the time is over; the number of runs with something wrong."""
    end, chance = time.monotonic() + 60 * minutes, random.Random(seed)
    losses, faults, wrong, done = dict[Job, list[float]](), Counter[str](), 0, 0
    while time.monotonic() < end:
        job = chance.choice(JOBS)
        with small_disk() as folder:
            if job not in losses:
                losses[job] = undisturbed(folder, job)
            run = Soaked(folder, job, chance)
            run.train()
            run.judge(losses[job])
            faults += run.found
            done, wrong = done + 1, wrong + bool(run.said)
            text = "; ".join(run.said) or "the curve is the undisturbed one"
            print(f"run {done}, {job.plan}, {dict(run.found)}: {text}", flush=True)
    print(f"seed {seed}: {done} runs, {faults.total()} faults {dict(faults)}, {wrong} wrong")
    return wrong


def many_steps(steps: int, plan: str) -> list[dict[str, int]]:
    """On one rank: the vital signs, LINES times in so many steps of one linear layer."""
    world = init()
    engine = sw.parallelize(nn.Linear(2, 1), plan, world, loss=lambda model, x: model(x).mean())
    lines = list[dict[str, int]]()
    for step in range(1, steps + 1):
        engine.step(torch.full((1, 2), float(world.rank)))
        if step % max(1, steps // LINES) == 0:
            lines.append(vital_signs(world.rank, step))
    return lines


def flat(steps: int) -> int:
    """Whether two ranks of `many_steps` grow: the number of those that do."""
    wrong = 0
    for lines in spawn(many_steps, 2, (steps, "dp2 zero3")):
        grown = not_flat(lines)
        shown = [{key: line[key] for key in list(line)[1:]} for line in (lines[10], lines[-1])]
        print(f"{shown[0]} -> {shown[1]}: {'; '.join(grown) or 'flat'}", flush=True)
        wrong += bool(grown)
    return wrong


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.soak")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=0, help="so many tiny steps, and no faults")
    asked = options.parse_args()
    return min(1, flat(asked.steps) if asked.steps else soak(asked.minutes, asked.seed))


#: How much a process may grow between its tenth line and its last.
GROWTH_BYTES = 32 * 2**20


def vital_signs(rank: int, step: int) -> dict[str, int]:
    """This process after a step: its descriptors, threads and resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "pid": os.getpid(),
        "rank": rank,
        "step": step,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def not_flat(lines: Sequence[dict[str, int]]) -> list[str]:
    """What grew in a process after the first ten of these lines."""
    first, last = lines[10], lines[-1]
    grown = [key for key in ("descriptors", "threads") if last[key] > first[key] + 2]
    if last["resident_bytes"] > first["resident_bytes"] + GROWTH_BYTES:
        grown.append("resident_bytes")
    return [f"{key} grew from {first[key]} to {last[key]}" for key in grown]


if __name__ == "__main__":
    sys.exit(main())
