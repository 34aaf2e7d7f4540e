"""The tensors of a module's output, wherever they are in it, and whether they are all of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.core.tools.tree import PLAIN, parts

#: Types without tensors.
_PLAIN = (*PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Objects to look into in one output; what is beyond counts as not seen.
_MOST = 4096


class Output:
    """What is in a module's output.

    tensors   all that were found: in containers, their subclasses, dataclasses and other objects.
              For logits that are computed later (kernels/logits.py) it is what they are computed
              from
    opaque    whether some part cannot be looked into, such as a generator, a closure or a module:
              it may hold tensors, or read weights later
    """

    def __init__(self, out: Any) -> None:
        self.tensors: list[Tensor] = []
        self.opaque = False
        self._seen: dict[int, Any] = {}
        self._look(out)
        self._seen.clear()

    def _look(self, x: Any) -> None:
        if isinstance(x, Tensor):
            # a tensor of exactly this class first: the others may be asked only by attribute
            self.tensors.append(x if type(x) is Tensor else getattr(x, "computed_from", x))
        elif not (isinstance(x, _PLAIN) or id(x) in self._seen):
            self._seen[id(x)] = x
            module = isinstance(x, torch.nn.Module)
            inside = None if module or len(self._seen) > _MOST else parts(x)
            self.opaque |= inside is None
            for part in inside or ():
                self._look(part)


def tensors_in(out: Any) -> Iterator[Tensor]:
    """The tensors of a module's output or arguments."""
    yield from Output(out).tensors


def watch(tensors: Iterable[Tensor], act: Callable[[], None]) -> bool:
    """Call `act` when a gradient of one arrives; returns whether any requires one.

    If a view is changed in place, gradients no longer pass the node that made it, but they still
    reach that of the tensor it is a view of:

        h --view--> out          out += x:        h --CopySlices(view, add)--> h' --view--> out
    """
    with torch._C.DisableTorchFunctionSubclass():  # sharded logits would be gathered
        graded = [x for x in tensors if x.requires_grad]
        for x in (x for each in graded for x in (each, each._base) if x is not None):
            if x.requires_grad and not x.is_leaf:  # a leaf's hook would stay for every pass
                x.register_hook(lambda _: act())
    return bool(graded)


def shares_memory(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether some of `tensors` are in a storage of the others."""
    known = {x.untyped_storage()._cdata for x in others}
    with torch._C.DisableTorchFunctionSubclass():
        dense = [x for x in tensors if x.layout is torch.strided]
        return any(x.untyped_storage()._cdata in known for x in dense)
