"""Buffers outside of layers: every rank has them, and only the stage that is reached writes them.

    forward     x = embed(ids)   h = blocks(x)   self.running.lerp_(h.mean(0), 0.1)
    rank 0      computed         never reached           its buffer stays behind
    rank 1      skipped          computed                written: the others get it after the run

A trace states in which stage a buffer was written last. It raises InputError where a rank would
read a value that another rank has not computed yet, or would write twice.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardwise.core.errors import bad
from shardwise.core.tools.tree import PLAIN, leaves, paths
from shardwise.techniques.pipeline.stage_io import Spec
from shardwise.techniques.pipeline.trace.interceptor import Seen

#: What takes a tensor and does not read it, as its attributes do not.
_READ_NOTHING: Final = (Tensor.detach, Tensor.size)


@dataclass(frozen=True)
class WrittenBuffer:
    """The buffer `key` of container `index`; after the forward it is as `like`, on meta."""

    index: int
    key: str
    stage: int
    like: Tensor


@dataclass
class OutsideBuffers:
    """The effects of a traced forward on the twin's buffers outside of layers.

    last     by the container's index and the key, the tensor and its version when a stage ended
    common   the last stage in which code that every rank runs wrote or replaced the buffer
    reads    by storage, the first stage that reads the buffer's old value
    """

    containers: Sequence[tuple[nn.Module, nn.Module]]
    last: dict[tuple[int, str], tuple[Tensor, int]] = field(init=False, default_factory=dict)
    common: dict[tuple[int, str], int] = field(init=False, default_factory=dict)
    reads: dict[int, int] = field(init=False, default_factory=dict)

    def begin(self) -> None:
        self.last = self._now()
        self.storages = {storage_of(b): key for key, (b, _) in self.last.items()}

    def _now(self) -> dict[tuple[int, str], tuple[Tensor, int]]:
        return {
            (index, key): (b, b._version)
            for index, (_, theirs) in enumerate(self.containers)
            for key, b in theirs._buffers.items()
            if b is not None
        }

    def use(self, x: Tensor, what: Any, stage: int) -> None:
        attribute = getattr(what, "__name__", "") == "__get__"
        if what is Tensor.zero_:
            self.storages.pop(storage_of(x), None)  # what it had before has no effect
        elif storage_of(x) in self.storages and not attribute and what not in _READ_NOTHING:
            self.reads.setdefault(storage_of(x), stage)

    def of(self, x: Tensor) -> str:
        key = self.storages.get(storage_of(x))
        return "a tensor" if key is None else self._named(*key)

    def _named(self, index: int, key: str) -> str:
        return f"the buffer {type(self.containers[index][0]).__name__}.{key}"

    def close(self, stage: int) -> None:
        before, self.last = self.last, self._now()
        for key, (b, version) in self.last.items():
            if key not in before or before[key][0] is not b or before[key][1] != version:
                self.common[key] = stage

    def written(
        self, wrote: Mapping[int, tuple[int, int]], seen: Seen, several: bool
    ) -> tuple[WrittenBuffer, ...]:
        """The buffers that differ between ranks after the forward, which the tracer `wrote`."""
        old = {key: storage for storage, key in self.storages.items()}
        found: list[WrittenBuffer] = []
        for (index, key), (b, _) in self.last.items():
            in_place = wrote.get(storage_of(b), (-1, -1))[1]
            common, number = self.common.get((index, key), -1), seen.number(b)
            stage = max(common, in_place)
            read = self.reads.get(old.get((index, key), -1), stage)
            counts = (index, key) in old and (in_place >= 0 or number is None)
            if stage > read or (several and common >= 0 and counts):
                raise bad(
                    f"{self._named(index, key)} outside of the layers of a pipeline, which the "
                    f"forward reads in stage {read} and writes in stage {stage}",
                    "buffers that one stage reads and writes, on ranks with one stage each",
                    "the buffer in the layer that writes it, or a plan without pp",
                )
            if stage > 0 or in_place >= 0 or number is not None:
                found.append(WrittenBuffer(index, key, stage, b.detach().to("meta")))
        return tuple(found)


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


# --- bundles ------------------------------------------------------------------------------------

#: Shapes of microbatches whose traces are kept.
KEPT = 64
#: Traces of each, for microbatches with other values.
KEPT_OF_SHAPE = 8
#: Values in a microbatch on which its trace may depend.
_DESCRIBED = Tensor, *PLAIN, torch.dtype, torch.device, FunctionType

T = TypeVar("T")


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """The dims of `x` from the outermost in memory; None where it is contiguous or has gaps."""
    if x.is_contiguous():
        return None
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), x.shape[dim] == 1))
    return tuple(order) if x.permute(order).is_contiguous() else None


def spec_of(x: Tensor, order: Sequence[int] | None, trained: bool) -> Spec:
    return Spec(tuple(x.shape[dim] for dim in order or range(x.dim())), x.dtype, trained)


def require_unpacked(name: str, x: Any) -> None:
    """Raise InputError for packed sequences, which torch does not make on the meta device."""
    if leaves(x, PackedSequence):
        raise bad(
            f"a PackedSequence that {name} takes or returns, in a pipeline",
            "tensors between layers: the lengths of a packed sequence are values",
            "a layer (any nn.Module) that packs, calls the network and pads its output",
        )


class ByShape(Generic[T]):
    """A cache with entries for each set of microbatch shapes; it keeps the latest."""

    def __init__(self) -> None:
        self.known: dict[Hashable, list[T]] = {}

    def get(self, part: Any, mode: Hashable, make: Callable[[], T], fits: Callable[[T], bool]) -> T:
        """An entry for the shapes of `part` in this mode that `fits`; if there is none, `make`."""
        key = tuple((path, _described(x)) for path, x in paths(part, _DESCRIBED)), mode
        if key not in self.known and len(self.known) == KEPT:
            del self.known[next(iter(self.known))]
        entries = self.known.setdefault(key, [])
        for entry in reversed(entries):
            if fits(entry):
                return entry
        entries.append(make())
        del entries[:-KEPT_OF_SHAPE]
        return entries[-1]


def _described(x: Any) -> str:
    return f"{x.shape} {x.dtype} {x.requires_grad}" if isinstance(x, Tensor) else repr(x)
