"""What a forward reads from the batch: numbers and shapes on which its later operations may depend.

    if mask.all():                 True      the trace of another microbatch may have other events
    logits[labels != -100]         [17]      its values may have other shapes

Every rank has the batch, so it reads for itself. The trace (tracer.py) keeps the *answers*, in
their order, and holds for another microbatch of the same shapes if the answers are the same.
`AnswerReplay` finds out: it runs the operations on the batch alone, and skips all others.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.core.tools.tree import leaves
from shardwise.techniques.pipeline.stage import Stage
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.trace.interceptor import Of, Seen, name_of

#: Functions that return the numbers in a tensor to the program.
READS: Final = (
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"),
    *("__complex__", "__contains__", "equal", "allclose", "is_nonzero", "nonzero"),
)
#: Of these, those that return numbers, of which ranks can tell each other.
ASKED: Final = tuple(name for name in READS if name not in ("numpy", "__array__", "nonzero"))
#: Functions whose result has a shape that depends on the numbers.
_SHAPED: Final = (
    *("argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"),
    "bincount",
)
_MASKS: Final = (torch.bool, torch.uint8)
_INDEXED: Final = (Tensor.__getitem__, Tensor.__setitem__)


def masks(func: Any, args: Any, seen: Seen) -> list[Tensor]:
    if func not in _INDEXED:
        return []
    return [x for x in leaves(args[1], Tensor) if x.dtype in _MASKS and seen.number(x) is None]


def by_numbers(index: Any, known: list[Tensor]) -> Any:
    """The index with the places of each mask instead of the mask."""
    every = index if isinstance(index, tuple) else (index,)
    found: list[Any] = []
    for x in every:
        known_mask = any(x is each for each in known)
        found += x.nonzero(as_tuple=True) if known_mask else [x]
    return tuple(found)


def answers(func: Any, args: Any, out: Any, seen: Seen) -> Iterator[Any]:
    """What an operation tells the program of the batch's numbers."""
    name = name_of(func)
    if name in READS and not isinstance(out, Tensor):
        yield name, repr(out.tolist() if hasattr(out, "tolist") else out)
    elif name in READS or name in _SHAPED or (name == "where" and len(args) == 1):
        yield name, [tuple(x.shape) for x in leaves(out, Tensor)]
    else:
        yield from ((name, int(mask.count_nonzero())) for mask in masks(func, args, seen))


class AnswerReplay:
    """Plays a trace without any layer, and collects the answers."""

    def __init__(self, trace: StageTrace, seen: Seen) -> None:
        self.trace, self.seen, self.found = trace, seen, list[Any]()
        self.stage = Stage(len(trace.written), trace, seen, {})

    def without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.found += answers(func, args, out, self.seen)
        return out

    def op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.found += answers(func, args, None, self.seen) if func in _INDEXED else ()
        return self.stage.op(func, args, kwargs)

    def layer(self, of: Of, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.stage.layer(of, args, kwargs)

    @property
    def fits(self) -> bool:
        complete = self.stage.index == len(self.trace.events)
        return complete and tuple(self.found) == self.trace.answers
