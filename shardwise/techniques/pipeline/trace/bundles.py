"""The bundles of tensors that cross between stages: their specs, their gradients, their traces.

act of stage s     the tensors that stage s sends to later stages
grad of stage s    the gradients of the tensors that stage s received and that require one
"""

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shardwise.core.errors import bad
from shardwise.core.schedule.action import Token
from shardwise.core.tools.tree import PLAIN, leaves, paths
from shardwise.techniques.pipeline.stage_io import Spec, StageTrace

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
    """The spec of a tensor that is sent in this order of its dims."""
    return Spec(tuple(x.shape[dim] for dim in order or range(x.dim())), x.dtype, trained)


def require_unpacked(name: str, x: Any) -> None:
    """Raise InputError for packed sequences, which torch does not make on the meta device."""
    if leaves(x, PackedSequence):
        raise bad(
            f"a PackedSequence that {name} takes or returns, in a pipeline",
            "tensors between layers: the lengths of a packed sequence are values",
            "a layer (any nn.Module) that packs, calls the network and pads its output, or a plan "
            "without pp",
        )


def specs(trace: StageTrace, token: Token) -> Sequence[Spec]:
    """The specs of the bundle `token`, an act or a grad."""
    if token.kind == "act":
        return trace.bundles[token.stage]
    return [spec for spec in trace.bundles[token.stage - 1] if spec.requires_grad]


def require_grads(given: Sequence[Tensor], trace: StageTrace, stage: int) -> None:
    """Set requires_grad of the tensors `given`, which `stage` received, as in the trace."""
    for x, spec in zip(given, trace.bundles[stage - 1] if stage else (), strict=True):
        x.requires_grad_(spec.requires_grad)


def grads_back(
    found: Sequence[Tensor | None], trace: StageTrace, stage: int, device: torch.device
) -> list[Tensor]:
    """The grad of `stage`, from the gradients of its inputs; zeros if an input has none."""
    if not stage:
        return []
    return [
        torch.zeros(spec.shape, dtype=spec.dtype, device=device) if x is None else x.contiguous()
        for x, spec in zip(found, trace.bundles[stage - 1], strict=True)
        if spec.requires_grad
    ]


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
