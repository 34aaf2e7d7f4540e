"""What `tile:N` promises of a cross-entropy over V classes: V/N columns of logits at once.

    event     forward tile 0    forward tile 1    ...    loss
    alive     -                 sums of tile 0           sums of all tiles

(Memory-centric tiling: ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.) A layer in tiles gives
logits if the plain model calls a cross-entropy over as many classes as it has output features.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.core.memory_table import KEPT, TEMPORARY
from shardwise.core.plan.plan import Plan
from shardwise.prediction.memory_timeline import Event

#: Numbers of each position that a loss keeps beside the logits: of each tile, and in all.
OF_EACH_TILE, IN_ALL = 3, 16
#: Their bytes: sums have at least 32 bits.
BYTES: Final = {"fp64": 8}
LEAST_BYTES: Final = 4


class _LossCalls(TorchFunctionMode):
    """The positions of each cross-entropy that is called, by its number of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "cross_entropy":
            logits = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            classes = logits.shape[-1]
            self.positions[classes] = logits.numel() // max(1, classes)
        return func(*args, **kwargs)


def logits_most_bytes(
    plan: Plan, model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> Mapping[int, int]:
    """The most bytes of logits in a microbatch of `batch`, by the number of classes; {} untiled."""
    if plan.tiled is None:
        return {}
    here = next(model.parameters()).device
    with _LossCalls() as seen, torch.no_grad():
        loss(model, pytree.tree_map_only(Tensor, lambda x: x.to(here), batch))
    number, size = plan.tiled.number, BYTES.get(plan.precision or "", LEAST_BYTES)
    return {
        classes: positions // plan.microbatches * columns * size
        for classes, positions in seen.positions.items()
        for columns in [-(-classes // number) + OF_EACH_TILE * number + IN_ALL]
    }


def tiled_layers(model: nn.Module, events: Sequence[Event]) -> dict[str, int]:
    """The output features of the layers whose tiles are units of their own, by name."""
    found: dict[str, int] = {}
    for name in {event.unit.rpartition(".tiles.")[0] for event in events}:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            found[name] = layer.out_features
    return found


def grown_bytes(events: Sequence[Event], layer: str) -> int:
    """By how much activations grow from the first tile of `layer` to the loss, at most."""
    alive: dict[int, list[int]] = defaultdict(list)
    for event in events:
        first = event.kind == "forward" and event.unit.startswith(f"{layer}.tiles.")
        if first or (event.kind == "loss" and alive[event.microbatch]):
            now = event.by_category[KEPT] + event.by_category[TEMPORARY]
            alive[event.microbatch].append(now)
    return max((max(found) - found[0] for found in alive.values() if found), default=0)
