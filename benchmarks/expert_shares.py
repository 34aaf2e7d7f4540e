"""The share of a step that layers of experts spend in routing, dispatch, experts and combine.

    forward     begin ─ routing ─ routed ─ dispatch ─ experts begin ─ end ─ combine ─ end
    backward    output ─ combine ─ output of experts ─ experts ─ their rows ─ dispatch, routing

Forward moments are read in hooks of the modules, and in the layer's own report of its routing.
Backward moments are those at which gradients arrive; there dispatch and routing are not separated.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from shardwise.techniques.expert.moe_layer import MoE
from shardwise.techniques.expert.routing import Routing

PARTS: Final = (
    *("routing", "dispatch", "experts", "combine"),
    "backward of dispatch and routing",
)


@dataclass
class Clock:
    """Seconds by part, of all layers."""

    parts_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last_s: float = 0.0

    def mark(self, part: str = "") -> None:
        """The time since the mark before belongs to `part`; "" to none."""
        now = time.perf_counter()
        if part:
            self.parts_s[part] += now - self.last_s
        self.last_s = now

    def arrival(self, part: str, x: Tensor) -> None:
        """Mark when the gradient of `x` arrives."""

        def arrived(_: Tensor) -> None:
            self.mark(part)

        if x.requires_grad:
            x.register_hook(arrived)


@contextmanager
def timed(model: nn.Module) -> Iterator[Clock]:
    """Measure the layers of experts of `model` in this block."""
    clock, handles = Clock(), list[Any]()
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    before = [layer.place for layer in layers]
    for layer in layers:
        layer.place = replace(
            layer.place, on_routing=partial(_routed, clock, layer.place.on_routing)
        )
        handles += _hooks(layer, clock)
    try:
        yield clock
    finally:
        for layer, place in zip(layers, before, strict=True):
            layer.place = place
        for handle in handles:
            handle.remove()


def _routed(clock: Clock, before: Callable[[Routing], None], routing: Routing) -> None:
    clock.mark("routing")
    before(routing)


def _hooks(layer: MoE, clock: Clock) -> list[Any]:
    def begins(_: nn.Module, args: tuple[Any, ...]) -> None:
        clock.arrival("backward of dispatch and routing", args[0])
        clock.mark()

    def computes(_: nn.Module, args: tuple[Any, ...]) -> None:
        clock.arrival("experts", args[0])
        clock.mark("dispatch")

    def computed(_: nn.Module, __: Any, made: Tensor) -> None:
        clock.arrival("combine", made)
        clock.mark("experts")

    def ends(_: nn.Module, __: Any, made: tuple[Tensor, Tensor]) -> None:
        clock.arrival("", made[0])
        clock.mark("combine")

    return [
        layer.register_forward_pre_hook(begins),
        layer.experts.register_forward_pre_hook(computes),
        layer.experts.register_forward_hook(computed),
        layer.register_forward_hook(ends),
    ]


def shares(model: nn.Module, steps: Callable[[], None]) -> str:
    """The shares of `steps()`, in percent, as a note."""
    with timed(model) as clock:
        began = time.perf_counter()
        steps()
        whole_s = time.perf_counter() - began
    found = {part: clock.parts_s[part] / whole_s for part in PARTS if part in clock.parts_s}
    return "of a step: " + ", ".join(f"{part} {share:.0%}" for part, share in found.items())
