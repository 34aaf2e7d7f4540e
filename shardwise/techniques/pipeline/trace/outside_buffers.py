"""Buffers outside of layers: every rank has them, and only the stage that is reached writes them.

    forward     x = embed(ids)   h = blocks(x)   self.running.lerp_(h.mean(0), 0.1)
    rank 0      computed         never reached           its buffer stays behind
    rank 1      skipped          computed                written: the others get it after the run

A trace says in which stage a buffer was written last.  It raises InputError where a rank would read
a value that another rank has not computed yet, or would write twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn

from shardwise.core.errors import bad
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
    """What a forward that is traced does to the twin's buffers outside of layers.

    last     by the container's index and the key, the tensor and its version when a stage ended
    common   the last stage in which code that every rank runs wrote or replaced the buffer
    reads    by storage, the first stage that reads what the buffer had before
    """

    containers: Sequence[tuple[nn.Module, nn.Module]]
    last: dict[tuple[int, str], tuple[Tensor, int]] = field(init=False, default_factory=dict)
    common: dict[tuple[int, str], int] = field(init=False, default_factory=dict)
    reads: dict[int, int] = field(init=False, default_factory=dict)

    def begin(self) -> None:
        """The forward begins."""
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
        """An operation in this stage takes the tensor, which is no value."""
        attribute = getattr(what, "__name__", "") == "__get__"
        if what is Tensor.zero_:
            self.storages.pop(storage_of(x), None)  # what it had before has no effect
        elif storage_of(x) in self.storages and not attribute and what not in _READ_NOTHING:
            self.reads.setdefault(storage_of(x), stage)

    def of(self, x: Tensor) -> str:
        """The buffer whose memory the tensor shares."""
        key = self.storages.get(storage_of(x))
        return "a tensor" if key is None else self._named(*key)

    def _named(self, index: int, key: str) -> str:
        return f"the buffer {type(self.containers[index][0]).__name__}.{key}"

    def close(self, stage: int) -> None:
        """A stage ends."""
        before, self.last = self.last, self._now()
        for key, (b, version) in self.last.items():
            if key not in before or before[key][0] is not b or before[key][1] != version:
                self.common[key] = stage

    def written(
        self, wrote: Mapping[int, tuple[int, int]], seen: Seen, several: bool
    ) -> tuple[WrittenBuffer, ...]:
        """The buffers that differ between ranks after the forward.  Raises InputError: see above.

        `wrote` is the tracer's; `several`: this rank has several stages.
        """
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
                    "buffers that one stage reads and writes, on ranks with one stage each: a "
                    "microbatch reads a buffer before the one before it has come to a later stage",
                    "the buffer in the layer that writes it (any nn.Module with parameters), or a "
                    "plan without pp",
                )
            if stage > 0 or in_place >= 0 or number is not None:
                found.append(WrittenBuffer(index, key, stage, b.detach().to("meta")))
        return tuple(found)


def storage_of(x: Tensor) -> int:
    """What tensors that share memory have in common."""
    return x.untyped_storage()._cdata
