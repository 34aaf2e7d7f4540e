"""Arenas: contiguous memory for tensors that live from one unit to another.

    | slot | slot | slot |   | slot | slot |        temporary tensors lie elsewhere
      kept inputs              gradients

An allocator puts a tensor that lives long between two that live short. The holes that these leave
are too small for a large request later, although their sum is not. In an arena every long-lived
tensor has a slot. The sizes and the number of slots come from the plan, before the first step.
(M_D of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 6.3.)

A tensor in a slot has a storage of its own, which shares the arena's memory and keeps it alive. Its
slot is free again when that storage is freed: when neither a tensor nor autograd refers to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.core.buffer_sizes import Slots, aligned, arena_bytes


class _Slot:
    """A part of the arena, and the storage that uses it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.user: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return self.user is None or self.user.expired()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with a storage of its own over the slot's memory."""
        nbytes = prod(shape) * dtype.itemsize
        if self.memory.is_meta:  # of a dry run, whose meter must not see memory of its own
            with _disable_current_modes():
                own = self.memory.new_empty(nbytes)
        else:
            own = torch.from_dlpack(self.memory[:nbytes])  # a new storage over the same memory
        self.user = StorageWeakRef(own.untyped_storage())
        return own.view(dtype).view(shape)


class Arena:
    """Slots of fixed sizes in one piece of memory; `missed` counts tensors that found no slot."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.sizes: Slots = {}
        self.slots: list[_Slot] = []
        self.missed = 0

    def reserve(self, sizes: Slots, device: torch.device) -> None:
        """Take memory for so many slots of each size in bytes; the same sizes as before keep it."""
        if self.sizes == sizes:
            return
        self.sizes, self.slots = dict(sizes), []
        self.memory = None  # freed before the new memory is taken
        if not sizes:
            return
        self.memory = torch.empty(arena_bytes(sizes), dtype=torch.uint8, device=device)
        begin = 0
        for size in sorted(sizes):
            for _ in range(sizes[size]):
                self.slots.append(_Slot(self.memory[begin : begin + aligned(size)]))
                begin += aligned(size)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor like `like` in the smallest free slot that is large enough, or elsewhere."""
        nbytes = prod(shape) * like.dtype.itemsize
        for slot in self.slots if nbytes else ():
            if len(slot.memory) >= nbytes and slot.memory.device == like.device and slot.free:
                return slot.tensor(shape, like.dtype)
        self.missed += self.memory is not None
        return like.new_empty(shape)

    def keep(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x).copy_(x)

    def holds(self, x: Tensor) -> bool:
        key = x.untyped_storage()._cdata
        return any(slot.user is not None and slot.user.cdata == key for slot in self.slots)


#: Gives ordinary memory.
NO_ARENA: Final = Arena()


@dataclass
class Arenas:
    """The arenas of an engine: for kept inputs of recomputed modules, and for gradients."""

    kept: Arena = field(default_factory=Arena)
    gradients: Arena = field(default_factory=Arena)

    @property
    def memory(self) -> list[Tensor]:
        return [one.memory for one in (self.kept, self.gradients) if one.memory is not None]

    def hold(self, x: Tensor) -> bool:
        return self.kept.holds(x) or self.gradients.holds(x)
