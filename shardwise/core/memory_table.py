"""The table of memory: the categories of a rank's bytes, and who owns them.

    category      lasts     part of       on                   owner
    parameters    always                  device, host, disk   flat parameters; the rest of a row
    gathered      a unit    parameters    device               flat parameters that are resharded
    gradients     always                  device, host, disk   flat parameters
    optimizer     always                  device, host, disk   the optimizer: masters, states
    buffers       always                  device, host         the model; pool, arenas, disk
    kept          a unit    activations   device, host         autograd
    temporary     a kernel  activations   device, host         kernels, messages

Asynchronous schedules have "versions" too: old parameters, which the updater owns in a step. On the
engine's side the table is read by `owned` (engine/memory.py), on that of a prediction by the prices
of techniques (prediction/technique_price.py).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

ACTIVATIONS, GATHERED, KEPT, TEMPORARY = "activations", "gathered", "kept", "temporary"
#: What an engine owns, and the part of it that lasts as long as a unit is used.
OWNED: Final[tuple[str, ...]] = ("parameters", GATHERED, "gradients", "optimizer", "buffers")
PART_OF: Final = {GATHERED: "parameters"}
#: The categories between steps.
CATEGORIES: Final[tuple[str, ...]] = tuple(name for name in OWNED if name not in PART_OF)
#: Those at a moment of a step: predicted, and measured.
PREDICTED: Final[tuple[str, ...]] = (*OWNED, KEPT)
MEASURED: Final[tuple[str, ...]] = (*PREDICTED, TEMPORARY)


class Event(NamedTuple):
    """A moment of a step: `kind` is forward, loss, backward, update, end or a pipeline action.

    `by_category` has the live bytes of each category; `peak` is the largest sum since the previous
    event, which a dry run does not look for.
    """

    kind: str
    unit: str
    microbatch: int
    by_category: dict[str, int]
    peak: int = 0

    @property
    def total(self) -> int:
        """All categories."""
        return sum(self.by_category.values())

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}".strip()


def by_tier(
    device: Mapping[str, int], host: Mapping[str, int], disk: Mapping[str, int]
) -> dict[str, int]:
    """Bytes by category on the device, and those that are not zero in host memory and on a disk."""
    found = {**device} | {f"{name} on the host": count for name, count in host.items() if count}
    return found | {f"{name} on disk": count for name, count in disk.items() if count}
