"""A model in stages: its forward is traced once for each shape, then run stage by stage.

stages = Stages(StageLayers(model, twin(model), starts, {1}), device)
trace = stages.trace(lambda model: loss(model, microbatch))
ran = stages.run(1, trace, inputs, lambda model: loss(model, microbatch))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise.core.errors import InputError, bad
from shardwise.core.tools.hook import Absent
from shardwise.observe.meta_pass import UNKNOWN, as_on
from shardwise.techniques.pipeline.stage import Over, Ran, Stage
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.trace.answers import AnswerReplay
from shardwise.techniques.pipeline.trace.interceptor import Glue, Player, Seen
from shardwise.techniques.pipeline.trace.placeholders import StageLayers
from shardwise.techniques.pipeline.trace.tracer import Ask, Tracer


class Stages:
    """The stages of a model on this rank, whose `layers` no other Stages uses."""

    def __init__(
        self, layers: StageLayers, device: torch.device, storage: torch.device | None = None
    ) -> None:
        self.layers, self.count = layers, layers.count
        self.device, self.storage = device, storage or device

    def trace(self, call: Callable[[nn.Module], Any], ask: Ask | None = None) -> StageTrace:
        """Trace `call` on meta for this microbatch, in the current grad mode.

        The trace is valid for every microbatch of the same shapes that it `fits`. Tracing draws no
        random number from the default generators, and keeps no real tensor. `ask` answers reads of
        activations between layers (trace/probe.py); without it they raise.
        """
        layers, seen = self.layers, Seen(self.layers.numbers)
        layers.number_buffers(seen.put)
        follow = Tracer(layers, seen, self.device, partial(as_on, strict=True), ask)
        with self._twin(follow, seen) as twin:
            with torch._C.DisableTorchFunction():
                follow.outside.begin()
            try:
                call(twin)
            except UNKNOWN as error:
                raise self._hooked(follow.blame(error)) from error
            with torch._C.DisableTorchFunction():
                return follow.finish(several=1 < len(layers.own_stages) < layers.count)

    def _hooked(self, error: Exception) -> Exception:
        every = ((of.name, module) for of in self.layers.standing for module in of.twin.modules())
        hooks = ((name, hook) for name, module in every for hook in module._forward_hooks.values())
        names = [*dict.fromkeys(name for name, hook in hooks if not isinstance(hook, Absent))]
        if isinstance(error, InputError) or not names:
            return error
        return bad(
            f"a forward or a loss that fails in a pipeline ({type(error).__name__}: {error}), of a "
            f"model with forward hooks on {', '.join(names[:4])}",
            "activations that layers return: only the rank of a layer has what its hook stores",
            "the activation as an output of the forward, or a plan without pp",
        )

    def fits(self, trace: StageTrace, call: Callable[[nn.Module], Any]) -> bool:
        """Whether the forward reads the same numbers from this microbatch, of the same shapes."""
        if not trace.answers:
            return True
        seen = Seen(self.layers.numbers)
        self.layers.number_buffers(seen.put)
        replay = AnswerReplay(trace, seen)
        with self._twin(replay, seen) as twin, suppress(*UNKNOWN):
            call(twin)
            return replay.fits
        return False

    @contextmanager
    def _twin(self, player: Player, seen: Seen) -> Iterator[nn.Module]:
        """The twin, whose glue goes to `player`; no random number is drawn."""
        glue = Glue(player, seen, self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        alone = torch.random.fork_rng(devices=devices)
        with alone, _own_cache(), self.layers.following(glue) as twin, glue:
            yield twin

    def run(
        self,
        stage: int,
        trace: StageTrace,
        inputs: Sequence[Tensor],
        call: Callable[[nn.Module], Any],
    ) -> Ran:
        """Compute one stage: `inputs` are the tensors of bundle `stage - 1`. The model's buffers
        change as in any forward, and operations between layers may draw random numbers. With
        several stages on a rank, `call` runs for each, so it must not write to the batch.
        """
        layers = self.layers
        seen = Seen(layers.numbered())
        layers.number_buffers(seen.put)
        player = Stage(stage, trace, seen, layers.holding(stage))
        player.take(inputs)
        glue, ran = Glue(player, seen, self.device), Ran()
        written = player.writing(layers.pairs)
        with suppress(Over), _own_cache(), layers.playing(glue) as model, written, glue:
            try:
                ran.result = call(model)
            except UNKNOWN as error:
                raise self._hooked(error) from error
        player.end()
        ran.outputs = player.outputs()
        return ran


@contextmanager
def _own_cache() -> Iterator[None]:
    """`parametrize.cached` is for one pass, and a copy of a module has the same key."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before
