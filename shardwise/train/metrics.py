"""The record of a run: metrics.jsonl, one object a step, and the same numbers for callbacks.

A resumed run first removes the records after its checkpoint, so that each step appears once, and an
incomplete last line, which a crash leaves. It keeps every other line, also lines that are no
records.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from pydantic import TypeAdapter

from shardwise.callbacks.callback import Callbacks, numbers
from shardwise.checkpoint.folder import write_file
from shardwise.comm.move import all_gather_object
from shardwise.core.errors import InputError, RunError, one_line
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.prediction.cluster import PRESETS, cluster_of
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.expert.moe_layer import Load
from shardwise.train.data.packed import using_folder

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Record:
    """One step, counted from 1.

    step          the number of the step
    consumed      sequences of the training split that were used up to this step
    loss          the mean over the global batch's tokens, in nats; null if it was not finite
    lr            the learning rate of the step
    tokens        tokens of the global batch that the loss is the mean over
    seconds       the mean time of the steps since the last record, without evaluation and saving
    tokens_per_s  tokens over seconds
    sent_bytes    bytes that rank 0 sent in the step
    mfu           the share of the device's peak that the model's operations used, on rank 0: of
                  `run.cluster`, or of a GPU that a preset describes; else absent
    grad_norm     the norm of the gradient before clipping
    skipped       whether the update was skipped: fp16 overflowed, or the step was not finite
    validation    the validation loss in nats a token, if an evaluation followed the step
    memory_bytes  bytes of rank 0 by category, between steps
    expert_loads  choices that each expert computed, by layer
    dropped       the share of choices beyond the capacity
    gate_entropy  the mean entropy of a token's probabilities of experts, in nats
    ranks         the number of ranks that made the step
    """

    step: int
    consumed: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    sent_bytes: int
    mfu: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    validation: float | None = None
    memory_bytes: dict[str, int] | None = None
    expert_loads: dict[str, list[int]] | None = None
    dropped: float | None = None
    gate_entropy: float | None = None
    ranks: int | None = None

    def line(self) -> str:
        known = {key: v for key, v in asdict(self).items() if v is not None}
        finite = math.isfinite(self.loss)
        return json.dumps(known if finite else known | {"loss": None}, allow_nan=False)


_RECORD = TypeAdapter(Record)


def read(folder: Path) -> list[Record]:
    """The records of a run, in order. Other lines and unknown fields are ignored."""
    records = (record_in(line) for line in _lines(folder))
    return [record for record in records if record is not None]


def record_in(line: bytes) -> Record | None:
    """The record in a line; None if it is no JSON object with a record's fields and types."""
    try:
        found = json.loads(line)
        lost = {"loss": math.nan} if found["loss"] is None else {}
        return _RECORD.validate_json(json.dumps(found | lost), strict=True)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def keep_until(folder: Path, step: int) -> None:
    """Remove the records after `step`, and an incomplete last line, atomically."""
    kept = [line for line in _lines(folder) if (r := record_in(line)) is None or r.step <= step]
    if kept and not kept[-1].endswith(b"\n"):
        last = kept.pop()
        kept += [last + b"\n"] * (record_in(last) is not None)
    write_file(folder / FILE, lambda path: path.write_bytes(b"".join(kept)))


def _lines(folder: Path) -> list[bytes]:
    """The lines with their ends; JSON escapes every other line separator."""
    path = folder / FILE
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


class MetricsWriter:
    """Writes records on rank 0, and passes them to the callbacks. `failure` says why the run ends
    on all ranks: a callback failed, or its folder is gone. `unwritten` reports a full disk, once.
    """

    def __init__(self, file: TextIO | None, callbacks: Callbacks) -> None:
        self._file = file
        self._callbacks = callbacks
        self.failure = self.unwritten = ""
        self._full = False

    def write(self, record: Record) -> None:
        """Append the record and call the callbacks; may set `failure` or `unwritten`."""
        try:
            if self._file is not None:
                self._append(self._file, record)
            self._callbacks.step_ended(record.step, tags(record))
            if record.validation is not None:
                found = {"loss/validation": record.validation}
                self._callbacks.evaluated(record.step, found)
        except (RunError, InputError) as error:
            self.failure = str(error)

    def _append(self, file: TextIO, record: Record) -> None:
        """Raises RunError if the file is no longer where it was opened."""
        try:
            there = os.path.samestat(os.fstat(file.fileno()), Path(file.name).stat())
        except FileNotFoundError:
            there = False
        except OSError:  # of a server that does not answer now
            there = True
        if not there:
            raise RunError(
                f"The run's folder '{Path(file.name).parent}' was renamed or removed while the run "
                f"was writing there, before step {record.step} was recorded. The run was stopped. "
                "Give the folder its name again, and continue with --resume."
            )
        try:
            file.write(record.line() + "\n")
            file.flush()
            self._full = False
        except OSError as error:
            why = f"step {record.step} could not be recorded in '{file.name}'"
            goes_on = "Training goes on; the report lacks such steps"
            self.unwritten = "" if self._full else f"{why} ({error.strerror or error}). {goes_on}"
            self._full = True

    def take_unwritten(self) -> str:
        said, self.unwritten = self.unwritten, ""
        return said

    def saved(self, step: int, path: Path) -> None:
        """Call the callbacks after a save; sets `failure` if one fails."""
        try:
            self._callbacks.saved(step, path)
        except (RunError, InputError) as error:
            self.failure = str(error)

    def require_written(self) -> None:
        if self.failure:
            raise RunError(one_line(self.failure))


def peak_flops(cluster: str | None, plan: Plan, device: torch.device) -> float | None:
    """The peak of a device in the precision of the plan, by `run.cluster` or a GPU's preset."""
    if cluster is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        sxm = "PCIe" not in name and "NVL" not in name
        presets = (key for key, of in PRESETS.items() if of.device.name.split()[0] in name)
        cluster = next(presets, None) if sxm else None
    if cluster is None:
        return None
    return cluster_of(cluster).device.peak_flops.get(plan.precision or "fp32")


def tags(record: Record) -> dict[str, float]:
    """The record's finite numbers, by the names that callbacks get."""
    named = {
        "loss/train": record.loss,
        "optimizer/lr": record.lr,
        "optimizer/grad_norm": record.grad_norm,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/mfu": record.mfu,
        "bytes/step": record.sent_bytes,
        "experts/dropped": record.dropped,
        "experts/gate_entropy": record.gate_entropy,
    }
    memory = record.memory_bytes or {}
    return numbers(named | {f"memory/{category}": size for category, size in memory.items()})


@contextmanager
def writer(folder: Path, after: int) -> Iterator[TextIO]:
    """Open the metrics of the run in `folder`, to continue after step `after`."""
    with using_folder(folder, "run.folder"):
        keep_until(folder, after)
        file = (folder / FILE).open("a", encoding="utf-8")
    try:
        yield file
    finally:
        with suppress(OSError):  # a full disk, which `write` has said
            file.close()


# --- experts of a run -----------------------------------------------------------------------------


class StepLoads(NamedTuple):
    """The layers of experts of all stages in a training step. `computed` has choices by layer and
    expert. `dropped` is the share of choices beyond the capacity. `entropy`, in nats, is that of a
    token's probabilities, the mean over tokens and layers; None if no layer reports it.
    """

    computed: dict[str, list[int]] | None = None
    dropped: float | None = None
    entropy: float | None = None


def step_loads(engine: Engine) -> StepLoads:
    """The loads of the last step. Called by all ranks, since pipeline stages exchange theirs."""
    own = engine.sharded.of(ExpertLayout)
    found: dict[str, Load] = dict(own.loads)
    if own.mixes and engine.staging:
        for loads in all_gather_object(dict(own.loads), engine.world):
            found |= loads
    if not found:
        return StepLoads()
    layers = [found[name] for name in sorted(found, key=_place)]
    wanted = sum(sum(load.wanted) for load in layers)
    entropies = [load.entropy for load in layers if load.tokens]
    return StepLoads(
        {name: list(found[name].computed) for name in sorted(found, key=_place)},
        sum(load.dropped for load in layers) / max(1, wanted),
        sum(entropies) / len(entropies) if entropies else None,
    )


def _place(name: str) -> list[tuple[int, str]]:
    """A sort key: blocks.2 comes before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def relative_loads(loads: dict[str, list[int]]) -> dict[str, list[float]]:
    return {name: [len(own) * n / max(1, sum(own)) for n in own] for name, own in loads.items()}


def sum_loads(records: Sequence[Record]) -> dict[str, list[int]]:
    """By layer, the sum over all records that have loads."""
    found: dict[str, list[int]] = {}
    for record in records:
        for name, own in (record.expert_loads or {}).items():
            before = found.get(name, [0] * len(own))
            found[name] = [a + b for a, b in zip(before, own, strict=True)]
    return found


def busiest(loads: dict[str, list[int]]) -> float:
    """The largest load of an expert, as a multiple of its layer's mean."""
    return max(max(own) for own in relative_loads(loads).values())


def words(record: Record) -> str:
    """The experts of a step in a few words, or ""."""
    if not record.expert_loads:
        return ""
    most = f"busiest expert {busiest(record.expert_loads):.2f}x the mean"
    dropped = f"{record.dropped or 0:.1%} dropped"
    entropy = "" if record.gate_entropy is None else f", gate entropy {record.gate_entropy:.2f}"
    return f"{most}, {dropped}{entropy}"
