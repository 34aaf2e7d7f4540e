"""A prediction as a table, and the answer: does it fit, and if not, which plan would?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.prediction.relief import added_words, relieved
from shardwise.train.progress import size_text

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan
    from shardwise.prediction.prediction import Prediction

PEAK = "peak on the device"


@dataclass(frozen=True)
class Answer:
    """What a prediction says about a device.

    parts         bytes of each part of the peak on one rank's device
    in_all        the same for all ranks
    rows, tokens  of all data ranks in a step; 0 tokens: the model reads no text
    device_bytes  of one rank's device; None: unknown
    largest       the largest part
    instead       the plan under which that part takes less; None: no word relieves it
    """

    plan: "Plan"
    parts: dict[str, int]
    in_all: dict[str, int]
    rows: int
    tokens: int
    device_bytes: int | None
    largest: str
    instead: "Plan | None"

    @property
    def fits(self) -> bool | None:
        return None if self.device_bytes is None else self.peak_bytes <= self.device_bytes

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """What `--json` adds to the prediction."""
        return {
            "peak_parts": self.parts,
            "in_all": self.in_all,
            "rows_a_step": self.rows,
            "tokens_a_step": self.tokens,
            "device_memory": self.device_bytes,
            "fits": self.fits,
            "largest_part": self.largest,
            "relieved_by": None if self.instead is None else str(self.instead),
        }

    def sentences(self) -> list[str]:
        """What the table does not say."""
        rows = f"{self.rows:,} row{'s' * (self.rows != 1)}"
        tokens = f"{rows} with {self.tokens:,} tokens" if self.tokens else rows
        found = [f"A step trains on {tokens}, over all ranks."]
        if self.device_bytes is not None:
            share = self.peak_bytes / self.device_bytes
            verb = "fits" if self.fits else "does not fit"
            size = size_text(self.device_bytes)
            found.append(f"It {verb}: the peak is {share:.0%} of {size}.")
        size = self.parts[self.largest]
        part = f"{size_text(size)} or {size / max(1, self.peak_bytes):.0%} of the peak"
        found.append(f"The largest part is {self.largest}: {part}.")
        if self.instead is not None:
            word = added_words(self.plan, self.instead)
            found.append(f'{word} makes it smaller: the plan "{self.instead}".')
        return found


def answer(
    found: "Prediction",
    batch: Any,
    device_bytes: int | None = None,
    *,
    rows: int | None = None,
    device: str = "auto",
) -> Answer:
    """The answer for a rank's `batch` and devices of `device_bytes`.

    device_bytes  None: the plan's bound, or the memory of this host's GPU unless `device` is "cpu"
    rows          of all ranks; None: each has as many as `batch`
    """
    from torch import Tensor, cuda
    from torch.utils._pytree import tree_leaves

    parts, plan = dict(found.dry_step.parts), found.plan
    part = max(parts, key=parts.__getitem__)
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    texts = (x.shape[1] for x in leaves if x.dim() == 2 and not x.is_floating_point())
    device_bytes = device_bytes or plan.device_memory_bytes
    if device_bytes is None and device != "cpu" and cuda.is_available():
        device_bytes = cuda.get_device_properties(0).total_memory
    rows = len(leaves[0]) * plan.shares if rows is None else rows
    return Answer(
        plan=plan,
        parts=parts,
        in_all=_in_all(found),
        rows=rows,
        tokens=rows * next(texts, 0),
        device_bytes=device_bytes,
        largest=part,
        instead=relieved(plan, part),
    )


def _in_all(found: "Prediction") -> dict[str, int]:
    """Sums over all ranks. The ranks of one pipeline stage count the same."""
    stages = found.plan.mesh.line("pp", found.rank)
    each = [(found if rank == found.rank else found.on(rank)).dry_step.parts for rank in stages]
    times = found.world // len(stages)
    return {name: times * sum(parts.get(name, 0) for parts in each) for name in each[0]}


def show(numbers: dict[str, Any], told: Answer, console: Console) -> None:
    """Print `numbers`, the object of --json, as a table with `told` below it."""
    world, timed = numbers["world"], numbers["seconds"]
    title = f"{numbers['plan']} on {numbers['model']}: rank {numbers['rank']} of {world}"
    heads = ["a rank", f"all {world:,}"]
    heads += [] if told.device_bytes is None else [f"of {size_text(told.device_bytes)}"]
    table = Table(title=title)
    for head in ("", *heads, *["seconds"] * (timed is not None)):
        table.add_column(head, justify="right" if head else "left")
    total = {PEAK: told.peak_bytes}
    for name, count in (told.parts | total).items():
        if name in total:
            table.add_section()
        cells = [size_text(count), size_text(sum(told.in_all.values()))]
        cells[1] = cells[1] if name in total else size_text(told.in_all[name])
        if told.device_bytes is not None:
            cells.append(f"{count / told.device_bytes:.1%}")
        table.add_row(name, *cells)
    table.add_section()
    for label, count in _elsewhere(numbers):
        table.add_row(label, size_text(count))
    table.add_section()
    blank = [""] * (len(heads) - 1)
    for kind, count in numbers["bytes"].items():
        table.add_row(f"sent: {kind}", size_text(count), *blank, *_time(numbers, kind))
    if timed is not None:
        table.add_row("sent: all, no overlap", "", *blank, f"{sum(timed.values()):.2e}")
    console.print(table)
    for line in (*_recomputed(numbers), *told.sentences(), *_step(numbers["step_time"])):
        console.print(line, soft_wrap=True)
    console.print(f"Computed in {numbers['time_ms']:,} ms, without starting a rank.")


def _elsewhere(numbers: dict[str, Any]) -> list[tuple[str, int]]:
    found = [(name, count) for name, count in numbers["memory"].items() if " on " in name]
    if numbers["host_activations"]:
        found.append(("activations on the host", numbers["host_activations"]))
    return found


def _time(numbers: dict[str, Any], kind: str) -> list[str]:
    if numbers["seconds"] is None:
        return []
    each = numbers["seconds"].get(kind)
    if each is None:
        return [""]
    return [f"{each:.2e} for {numbers['messages'].get(kind, 1)}"]


def _step(times: dict[str, Any] | None) -> list[str]:
    if times is None:
        return []
    parts = {"compute": times["compute_s"]}
    parts |= {f"exposed {axis}": seconds for axis, seconds in times["exposed_s"].items()}
    parts |= {"bubble": times["bubble_s"], "update": times["update_s"]}
    shares = ", ".join(f"{name} {s / times['step_s']:.1%}" for name, s in parts.items() if s)
    rate = f"{times['tokens_per_s']:,.0f} tokens/s over all ranks, " * bool(times["tokens_per_s"])
    found = [f"A step takes {times['step_s']:.3g} s: {shares}; {rate}MFU {times['mfu']:.1%}."]
    missing = ", ".join(times["unmodelled"])
    return found + [f"The time of {missing} is not predicted, and missing in this."] * bool(missing)


def _recomputed(numbers: dict[str, Any]) -> list[str]:
    """The modules that the backward pass computes again, and what that costs."""
    names = numbers["recomputed"]
    if not names:
        return []
    kinds = dict.fromkeys(names.values())
    counts = [f"{sum(how == kind for how in names.values())} {kind}" for kind in kinds]
    flops = numbers["recomputed_flops"]
    return [f"Recomputed modules: {', '.join(counts)}; {flops:.3g} operations more in a step."]
