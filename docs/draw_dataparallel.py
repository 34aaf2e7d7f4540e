"""Draws docs/figures/dataparallel.png: where the time of a step of sw.DataParallel goes.

    python docs/draw_dataparallel.py [small] [2]        size of the GPT, number of devices (cpu)

It makes the step of sw.DataParallel from its four operations, and notes when each begins and ends.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn

import shardwise as sw
from shardwise.models import gpt
from shardwise.models.gpt import SIZES
from shardwise.models.registry import of_sizes

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

STEPS = 11
ROWS = 8
COLOURS = {
    "scatter": "#e45756",
    "replicate": "#f58518",
    "forward": "#4c78a8",
    "gather": "#b279a2",
    "backward": "#54a24b",
}


@dataclass
class Step:
    """The intervals of one step: (lane, phase, start, end) in seconds; lane 0 is the caller's."""

    began: float = field(default_factory=time.perf_counter)
    intervals: list[tuple[int, str, float, float]] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.began

    def add(self, lane: int, phase: str, start: float) -> float:
        """Note an interval that ends now; returns its end."""
        end = self.now()
        self.intervals.append((lane, phase, start, end))
        return end

    def seconds(self, lane: int, phase: str) -> float:
        return sum(e - s for where, what, s, e in self.intervals if (where, what) == (lane, phase))

    @property
    def end(self) -> float:
        return max(end for *_, end in self.intervals)


class Timed(nn.Module):
    """A replica that notes its forward pass."""

    def __init__(self, inner: nn.Module, lane: int, step: Step) -> None:
        super().__init__()
        self.inner, self.lane, self.step = inner, lane, step

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        start = self.step.now()
        out = self.inner(inputs)
        self.step.add(self.lane, "forward", start)
        return out


def one(module: nn.Module, batch: dict[str, torch.Tensor], devices: list[str]) -> Step:
    """A step, forward and backward."""
    step = Step()
    inputs = sw.replicas.scatter(batch["inputs"], devices)
    at = step.add(0, "scatter", 0.0)
    replicas = sw.replicas.replicate(module, devices)
    step.add(0, "replicate", at)
    timed = [Timed(replica, i + 1, step) for i, replica in enumerate(replicas)]
    outputs = sw.replicas.parallel_apply(timed, inputs, devices=devices)
    at = step.now()
    first, last = [0.0] * len(devices), [0.0] * len(devices)
    for i, (replica, output) in enumerate(zip(replicas, outputs, strict=True)):
        output.register_hook(lambda _, i=i: first.__setitem__(i, step.now()))
        for p in replica.parameters():
            p.register_hook(lambda _, i=i: last.__setitem__(i, step.now()))
    together = sw.replicas.gather(outputs, devices[0])
    at = step.add(0, "gather", at)
    targets = batch["targets"].flatten()
    nn.functional.cross_entropy(together.flatten(0, 1), targets).backward()
    step.add(0, "backward", at)
    step.intervals += [(i + 1, "backward", first[i], last[i]) for i in range(len(devices))]
    return step


def draw(step: Step, devices: list[str], title: str, path: Path) -> None:
    """One lane for the caller's thread, and one for each device."""
    figure, panel = plt.subplots(figsize=(10, 1.2 + 0.6 * (len(devices) + 1)))
    for lane, phase, start, end in step.intervals:
        panel.barh(lane, (end - start) * 1e3, 0.6, start * 1e3, color=COLOURS[phase])
    lanes = ["caller", *(f"device {i} ({name})" for i, name in enumerate(devices))]
    panel.set_yticks(range(len(lanes)), lanes)
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    panel.set_title(title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="lower center", ncol=len(COLOURS), frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)


def main(size: str = "small", devices: str = "2") -> None:
    """Measure, print the medians in ms, and draw the step of median length."""
    torch.set_num_threads(1)
    names = ["cpu"] * int(devices)
    trainable = of_sizes(size, SIZES[size])
    module, batch = trainable.build(), trainable.batch(ROWS, 0)
    assert isinstance(module, gpt.GPT)
    steps = [one(module, batch, names) for _ in range(STEPS)][2:]
    lanes = [(0, phase) for phase in ("scatter", "replicate", "gather", "backward")]
    lanes += [(i + 1, phase) for i in range(len(names)) for phase in ("forward", "backward")]
    for lane, phase in lanes:
        median = statistics.median(step.seconds(lane, phase) for step in steps)
        print(f"{f'device {lane - 1}' if lane else 'caller':9} {phase:10} {median * 1e3:9.2f} ms")
    typical = sorted(steps, key=lambda step: step.end)[len(steps) // 2]
    title = f"GPT {size}, {ROWS} rows on {len(names)} devices: forward and backward"
    draw(typical, names, title, Path(__file__).parent / "figures" / "dataparallel.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
