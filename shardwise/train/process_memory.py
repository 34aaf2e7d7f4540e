"""The memory of a rank's process: its peak in RAM, and what of it is predicted.

    before the model     measured: Python, torch and the data, before anything of the model is made
    device               the predicted peak of a step (prediction/peak.py), where the device is the
                         host's memory
    host                 states and activations that rest there, and the buffers of a disk

The prediction is their sum.  The peak is what the system counts as resident, from the start of the
process on, while the model is made, trained, evaluated and saved, and with pages of mapped files.
"""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardwise.prediction.peak import device_peak_bytes
from shardwise.prediction.prediction import Prediction

_STATUS: Final = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """One rank's process; `predicted_bytes` is 0 where no prediction is possible.

    `before_bytes` is what it had before anything of the model was made.
    """

    peak_bytes: int
    before_bytes: int
    predicted_bytes: int = 0


def resident_bytes() -> int:
    """The memory of this process now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_memory(before_bytes: int, found: Prediction | None, *, on_host: bool) -> ProcessMemory:
    """The peak of this process, which had `before_bytes` before the model was made.

    `on_host`: the device is the host's memory.
    """
    if found is None:
        return ProcessMemory(peak_bytes(), before_bytes)
    host = sum(found.host_memory.values()) + found.host_activations
    device = device_peak_bytes(found) if on_host else 0
    return ProcessMemory(peak_bytes(), before_bytes, before_bytes + device + host)


def _status(name: str) -> int:
    try:
        text = _STATUS.read_text(encoding="ascii")
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[:1] == [f"{name}:"]), 0)
