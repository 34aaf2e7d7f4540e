"""The rerun: another rank computes a microbatch of each data rank again, and results are compared.

    rank 0    again(2)    own 0    further microbatches ...     again(k), own k: the loss and the
    rank 1    again(0)    own 1    ...                          gradients of the first microbatch
    rank 2    again(1)    own 2    ...                          of rank k, before any sum

Rank k sends its microbatch and the states of its random generators to the next rank, which begins
its step with a forward and a backward pass of it, with the same buffers. These gradients count for
nothing, but the pass gathers and reduces units as any microbatch does. The ranks compare hashes of
both results in a number that they sum anyway (same_on_ranks.py). A fault of a processor shows as a
difference, which no comparison of replicas finds: the sum of gradients is equal on all of them.

(The rerun state machine of Megatron-LM repeats a step on the same and on another rank.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.agreement.checksum import LOSS, Computed, Reruns, numbers_of
from shardwise.comm.move import all_to_all, gather_object
from shardwise.comm.unchanged import drawing_from, generators_of, kept_buffers
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import CheckEvery
from shardwise.core.tools.tree import leaves, mapped
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data

#: The loss of a part of the batch, or of its copy.
Objective = Callable[..., Tensor]
_GRADIENT: Final = "the gradient of "
#: Runs forward and backward of a part with so many tokens.
Repeat = Callable[[Any, float, Objective], object]


def require(plan: Plan, every: CheckEvery) -> None:
    """Raise InputError for a rerun under a plan that cannot repeat a microbatch."""
    words = {
        plan.pipeline: plan.pipeline is not None,
        f"tp{plan.size_of('tp')}": plan.size_of("tp") > 1,
        f"cp{plan.cp}": plan.cp > 1,
        f"ep{plan.ep}": plan.ep > 1,
        f"offload:{plan.offload}": plan.offload is not None,
        "activations:host": plan.activations_on_host,
        f"recompute:{plan.recompute}": plan.recompute_budget_bytes > 0,
        "tile": plan.tile is not None,
        "arenas": plan.arenas,
        "plans of single layers": bool(plan.layers),
        "one data rank": plan.data_size < 2,
    }
    found = [str(word) for word, is_there in words.items() if is_there]
    if every.rerun and found:
        raise bad(
            f"check_every=\"rerun:{every.rerun}\" under '{plan}' (it has {', '.join(found)})",
            "a rerun under two or more data ranks, each with the full model: the words ddp, zero1, "
            "zero2, zero3, dp_replicate, accumulate, recompute:full and the precisions",
            f"check_every={every.ranks}",
        )


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor in the header of a microbatch."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def exchange(part: Any, tokens: float, axis: Axis, device: torch.device) -> tuple[Any, ...]:
    """Send a microbatch, its tokens and generator states to the next rank; returns the previous
    one's.
    """
    tensors = list[Tensor]()

    def shape(x: Tensor) -> _Shape:
        tensors.append(x)
        return _Shape(x.dtype, tuple(x.shape))

    header = mapped(shape, part, Tensor, objects=True), float(tokens)
    states = [generator.get_state() for generator in generators_of(device)]
    flat = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    own = torch.cat([x.to(device) for x in (*states, *flat)])
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    shapes, theirs = gather_object(header, axis, device)[before]
    sizes = [*map(len, states), sum(x.bytes for x in leaves(shapes, _Shape, objects=True))]
    counts = [[0] * axis.size, [0] * axis.size]
    counts[0][before], counts[1][after] = sum(sizes), len(own)
    *states, rest = all_to_all(own, axis, *counts).split(sizes)

    def values(shape: _Shape) -> Tensor:
        nonlocal rest
        own, rest = rest[: shape.bytes], rest[shape.bytes :]
        return own.clone().view(shape.dtype).view(shape.shape)

    return (
        mapped(values, shapes, _Shape, objects=True),
        theirs,
        [state.clone().cpu() for state in states],
    )


class Rerun:
    """The reruns of one rank, in every `every`-th step; 0: none."""

    def __init__(self, data: Data, every: int, device: torch.device) -> None:
        self.data, self.every, self.device = data, every, device
        axes = data.consensus.axes
        self.axis = next((axis for axis in axes if axis.size > 1), axes[0])
        self.now: Computed | None = None  # what is being computed, if it is compared
        self.counts = True  # whether its gradients count
        if every:
            data.collects = self._collected

    def begin(self, objective: Objective, part: Any, tokens: float, repeat: Repeat) -> Objective:
        """Compute the previous rank's microbatch; returns `objective`, which notes this rank's
        results.
        """
        same, self.now = self.data.consensus.same, None
        same.reruns = None
        if not self.every or self.data.consensus.rounds % self.every:
            return objective
        own, again = Computed(), Computed()
        with self.axis.ledger.phase("check"):
            theirs, their_tokens, states = exchange(part, tokens, self.axis, self.device)
        with drawing_from(self.device, states), kept_buffers(self.data.root):
            self.counts = False
            repeat(theirs, their_tokens, self._noting(objective, theirs, again))
            self.counts = True
        names = [LOSS, *(_GRADIENT + n for flat in self.data.trained for n in flat.names)]
        of = same.data_rank(self.axis, -1)
        same.reruns = Reruns(own, again, names, same.data_rank(), of)
        return self._noting(objective, part, own)

    def _noting(self, objective: Objective, part: Any, computed: Computed) -> Objective:
        def call(model: nn.Module, x: Any, *own: Any) -> Tensor:
            self.now = computed if x is part else None
            loss = objective(model, x, *own)
            if self.now is not None:
                self.now[LOSS] = numbers_of(loss.detach())
            return loss

        return call

    def _collected(self, flat: Flat, index: int) -> None:
        grads = flat.grads
        if self.now is not None and grads.filled[index]:
            self.now[_GRADIENT + flat.names[index]] = numbers_of(grads.grad_views[index])
            if not self.counts:
                grads.filled[index] = grads.has_grad[index] = False
