"""Traces a forward pass on the meta device: which values it makes, and which stages use them.

The twin (placeholders.py) runs the user's code. Layers, and operations on their outputs, run on
meta. Operations on the batch and on buffers alone compute real values, since the code may read
them. The tracer raises InputError before anything else is computed if the code contains

    a read of a value          `if x.isnan().any():` - the ranks of other stages do not have it
    a layer called too late    in a stage after its own
    a value by a back door     a tensor made in a layer that the layer does not return
    a write to shared memory   in a stage other than the one that took the tensor's view

A write to a value creates a new value with the same name.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.move import require_no_transform
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.pipeline.stage import UNKNOWN, Unanswered
from shardwise.techniques.pipeline.stage_io import ForwardStep, Spec, StageTrace, crossing, maker
from shardwise.techniques.pipeline.trace.answers import ASKED, READS, answers, by_numbers, masks
from shardwise.techniques.pipeline.trace.back_doors import (
    SharedNumbers,
    require_arguments,
    require_no_capture,
)
from shardwise.techniques.pipeline.trace.interceptor import Of, Seen, line, name_of
from shardwise.techniques.pipeline.trace.outside_buffers import (
    OutsideBuffers,
    memory_order,
    require_unpacked,
    spec_of,
)
from shardwise.techniques.pipeline.trace.outside_buffers import storage_of as _storage
from shardwise.techniques.pipeline.trace.placeholders import StageLayers

META: Final = torch.device("meta")
#: Copies between devices: on meta there is one device.
_MOVES: Final = (Tensor.cpu, Tensor.cuda)


#: Finds out what the last event of an unfinished trace, a read of a value, gives.
Ask = Callable[[StageTrace], Any]


@dataclass
class TracedValue:
    """A traced value: `meta` is its tensor; `shape`, detached when it was made, keeps its shape."""

    origin: str
    stages: tuple[int, ...]
    meta: Tensor
    shape: Tensor
    uses: set[int] = field(default_factory=set)
    trained: bool = False


class Tracer:
    """The tracer of one run: the events so far, the values, and the stage reached."""

    def __init__(
        self,
        layers: StageLayers,
        seen: Seen,
        device: torch.device,
        around: Callable[[torch.device], AbstractContextManager[None]],
        ask: Ask | None = None,
    ) -> None:
        self.outside, self.ask, self.count = OutsideBuffers(layers.pairs), ask, layers.count
        self.seen, self.device, self.around = seen, device, around
        self.values = [
            TracedValue(origin, stages, x, x.detach(), trained=x.requires_grad)
            for origin, stages, x in layers.known_values()
        ]
        self.held = len(self.values)
        self.events: list[ForwardStep] = []
        self.stage, self.last = 0, ""
        self.assumed: list[str] = []  # layers that do not run on meta
        self.opened = len(self.values)  # the first value of this stage
        self.sharing: dict[int, list[int]] = defaultdict(list)  # by storage, values
        self.wrote: dict[int, tuple[int, int]] = {}  # by storage, (number, stage) of the last write
        self.written: list[set[int]] = [set() for _ in range(self.count)]
        self.kept: list[Tensor] = []
        self.answers: list[Any] = []  # what the forward read from the batch
        twins = [of.twin for of in layers.standing]
        self.numbers = SharedNumbers(twins, [twin for _, twin in layers.pairs])
        self.nodes: dict[Any, tuple[int, str]] = {}  # of autograd: the stage, the layer

    # --- operations and layers ----------------------------------------------------------------

    def without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that takes no value; it computes real tensors."""
        for x in leaves((args, kwargs), Tensor):
            self._check_common(x, func)
        out = func(*args, **kwargs)
        self.answers += answers(func, args, out, self.seen)
        return out

    def _check_common(self, x: Tensor, what: Any) -> None:
        self.outside.use(x, what, self.stage)
        if x.is_meta:
            raise bad(
                f"a tensor that {name_of(what)} takes after {self.last}, and no layer has returned",
                "layers that return the tensors they make, and buffers that are on a device",
                "return x, extra",
            )
        if _storage(x) in self.wrote:
            raise bad(
                f"{self.outside.of(x)} that {name_of(what)} takes after layer {self.last}, whose "
                "memory was written to through another tensor",
                "outputs of layers that are assigned to the tensor itself",
                "x[:, 0] = y instead of x[:, 0].copy_(y)",
            )

    def op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on values, on meta."""
        known = masks(func, args, self.seen)
        self.answers += answers(func, args, None, self.seen) if known else ()
        places = by_numbers(args[1], known) if known else None
        inputs, metas, args, kwargs = self._on_meta(func, args, kwargs)
        if known:
            args = args[0], mapped(lambda x: x.to(META), places, Tensor), *args[2:]
        act, args = _staying(func, args)
        versions = [x._version for x in metas]
        try:
            out = act(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            with suppress(Unanswered):
                if name_of(func) in ASKED and self.ask is not None:
                    return self._read_value(func, inputs, metas, self.ask)
            if name_of(func) in READS or "meta" in str(error).lower():
                raise self._unknown(func, inputs) from error
            raise
        return self._note(func, out, inputs, metas, versions)

    def _read_value(
        self, func: Any, inputs: Sequence[Tensor], metas: Sequence[Tensor], ask: Ask
    ) -> Any:
        self._used(func, inputs, metas, ())
        read = ForwardStep(func, self.stage, UNKNOWN, (), reads=True)
        crossed, specs, orders = self._crossed(self.stage + 1)
        answer = ask(
            StageTrace(
                (*self.events, read),
                tuple(tuple(specs[n]._replace(requires_grad=False) for n in b) for b in crossed),
                crossed,
                orders,
                tuple(map(frozenset, self.written[: self.stage + 1])),
                frozenset(),
                (),
            )
        )
        self.events.append(replace(read, out=answer))
        return answer

    def layer(self, of: Of, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a layer: the twin's layer runs, on meta."""
        stage = min((s for s in of.stages if s >= self.stage), default=None)
        if stage is None:
            raise bad(
                f"{of.name}, a layer of stage {of.stages[-1]}, called in stage {self.stage}",
                "layers that are called in the order of the stages",
                f"{of.name} defined after {self.last}, or called by the forward of the model",
            )
        if torch.is_autocast_enabled(self.device.type):
            raise bad(
                f"torch.autocast around {of.name}",
                "the precision in the plan, because a run on meta does not show what autocast does",
                "bf16 in the plan",
            )
        require_no_transform(f"{of.name} of a pipeline")
        require_no_capture()
        if self.stage < stage:
            self._close()
            self.stage = stage
        self.last = of.name
        require_unpacked(of.name, (args, kwargs))
        inputs, metas, on_meta, named = self._on_meta(of.name, args, kwargs)
        versions = [x._version for x in metas]
        before: list[Any] = [x.grad_fn for x in metas]
        with self.numbers.during(of.name, self.stage):
            try:
                with META:
                    out = of.twin(*on_meta, **named)
            except RuntimeError:  # it reads numbers, for example
                out, versions = self._run(of.twin, inputs, metas, args, kwargs)
        wrote = [i for i, x in enumerate(metas) if x._version != versions[i] and before[i]]
        before += [each for i in wrote for each, _ in before[i].next_functions]
        require_arguments(of.name, self.stage, leaves(out, Tensor), before, self.nodes)
        require_unpacked(of.name, out)
        if "forward" in vars(of.twin):
            self.assumed.append(of.name)
        return self._note(of.name, out, inputs, metas, versions)

    def _run(
        self, layer: nn.Module, inputs: Sequence[Tensor], metas: Sequence[Tensor], *given: Any
    ) -> tuple[Any, list[int]]:
        """Run a layer on meta, with the real tensors that follow from the batch."""
        pairs = zip(inputs, metas, strict=True)
        passed = [x.clone() if self.seen.number(x) is None else meta for x, meta in pairs]
        began = [x._version for x in passed]
        args, kwargs = _replaced(passed, *given)
        with self.around(self.device):
            out = _settled(layer, args, kwargs)
        wrote = [x._version != version for x, version in zip(passed, began, strict=True)]
        out = mapped(lambda x: x if x.is_meta else x.detach().to(META), out, Tensor)
        return out, [x._version - new for x, new in zip(metas, wrote, strict=True)]

    def _on_meta(
        self, what: Any, args: Any, kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], Any, Any]:
        inputs = leaves((args, kwargs), Tensor)
        metas = [self._meta(x, what) for x in inputs]
        args, kwargs = _replaced(metas, args, kwargs)
        args, kwargs = mapped(lambda _: META, (args, kwargs), torch.device)
        if isinstance(kwargs.get("device"), str | int):
            kwargs = kwargs | {"device": META}
        return inputs, metas, args, kwargs

    def _meta(self, x: Tensor, what: Any) -> Tensor:
        number = self.seen.number(x)
        if number is not None:
            value, meta = self.values[number], self.values[number].meta
            received = isinstance(what, str) and value.stages[-1] < self.stage
            # a view: what a layer has kept of this tensor is not what the next one receives
            return meta.view_as(meta) if received and meta.grad_fn is not None else meta
        self._check_common(x, what)
        return x.to(META)

    # --- the record ---------------------------------------------------------------------------

    def _note(
        self,
        what: Any,
        out: Any,
        inputs: Sequence[Tensor],
        metas: Sequence[Tensor],
        versions: Sequence[int],
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            changed = [i for i, x in enumerate(metas) if x._version != versions[i]]
            made = leaves(out, Tensor)
            if not made and not changed and not isinstance(what, str):
                return out
            numbers = self._used(what, inputs, metas, changed)
            origin = what if isinstance(what, str) else f"{name_of(what)} after {self.last}"
            numbers |= {id(metas[i]): self._add(metas[i], origin) for i in changed}
            for x in (x for x in made if id(x) not in numbers):
                number = self.seen.number(x)
                if number is None or number >= self.held:  # else a layer returns its own tensor
                    number = self._add(x, origin)
                numbers[id(x)] = number
            for i in changed:
                self.seen.put(inputs[i], numbers[id(metas[i])])
                self._write(inputs[i], metas[i], numbers[id(metas[i])])
            shapes = mapped(Tensor.detach, out, Tensor)
            writes = tuple((i, numbers[id(metas[i])]) for i in changed)
            here = tuple(numbers[id(x)] for x in made)
            self.events.append(ForwardStep(what, self.stage, shapes, here, writes))
        return out

    def _used(
        self, what: Any, inputs: Sequence[Tensor], metas: Sequence[Tensor], changed: Sequence[int]
    ) -> dict[int, int]:
        """Record the values that are used; return, by id, those that are not written to."""
        numbers: dict[int, int] = {}
        for i, x in enumerate(inputs):
            number = self.seen.number(x)
            if number is not None:
                self._use(number, what)
                if i not in changed:
                    numbers[id(metas[i])] = number
        return numbers

    def _add(self, x: Tensor, origin: str) -> int:
        number = len(self.values)
        self.values.append(TracedValue(origin, (self.stage,), x, x.detach()))
        self.sharing[_storage(x)].append(number)
        self.seen.put(x, number)
        return number

    def _use(self, number: int, what: Any) -> None:
        value = self.values[number]
        value.uses.add(self.stage)
        made = maker(value.stages, self.stage)
        if made is None:
            raise bad(
                f"{value.origin}, of stage {value.stages[0]}, used by {name_of(what)} in stage "
                f"{self.stage}",
                "a layer's parameters and buffers used in the stage of that layer, or later",
                "a call of the layer itself, or a definition of the layer where it is first used",
            )
        write, stage = self.wrote.get(_storage(value.meta), (-1, -1))
        if write > number and stage > made:
            raise bad(
                f"{value.origin}, made in stage {made}, used by {name_of(what)} after a write to "
                f"its memory in stage {stage}",
                "in-place operations on a tensor, or on a view taken in the same stage",
                "x = x + y, without the underscore",
            )

    def _write(self, inputs: Tensor, x: Tensor, number: int) -> None:
        storage = _storage(x)
        self.wrote[storage] = (number, self.stage)
        if not inputs.is_meta:  # of the batch, say: the tensor is a value from now on
            self.wrote[_storage(inputs)] = (number, self.stage)
            self.kept.append(inputs)  # so that no other gets its memory
        self.written[self.stage] |= {
            n for n in self.sharing[storage] if self.values[n].stages[-1] < self.stage
        }

    def _close(self) -> None:
        for value in self.values[self.opened :]:
            value.trained = value.meta.requires_grad
        self.opened = len(self.values)
        self.outside.close(self.stage)

    # --- the result ---------------------------------------------------------------------------

    def finish(self, several: bool) -> StageTrace:
        """The trace, for a rank that has `several` stages or one."""
        if self.stage < self.count - 1:
            raise bad(
                f"a forward that ends in stage {self.stage} of {self.count}, after {self.last}",
                "a forward that calls a layer of each stage",
                f"{self.stage + 1} stages, or starts at modules that are called",
            )
        self._close()
        self.numbers.warn(self.count - 1)
        values = self.values
        crossed, specs, orders = self._crossed(self.count)
        return StageTrace(
            tuple(self.events),
            tuple(tuple(specs[n] for n in bundle) for bundle in crossed),
            crossed,
            orders,
            tuple(map(frozenset, self.written)),
            frozenset(n for n, value in enumerate(values) if value.trained),
            tuple(self._read(stage, crossed) for stage in range(self.count)),
            tuple(self.answers),
            self.outside.written(self.wrote, self.seen, several),
        )

    def _crossed(
        self, stages: int
    ) -> tuple[tuple[tuple[int, ...], ...], dict[int, Spec], dict[int, tuple[int, ...]]]:
        values = self.values
        crossed = crossing([v.stages for v in values], [sorted(v.uses) for v in values], stages)
        numbers = {number for bundle in crossed for number in bundle}
        orders = {n: order for n in numbers if (order := memory_order(values[n].shape)) is not None}
        return (
            crossed,
            {n: spec_of(values[n].shape, orders.get(n), values[n].trained) for n in numbers},
            orders,
        )

    def _read(self, stage: int, crossed: Sequence[Sequence[int]]) -> frozenset[int]:
        """Parameters and buffers of a stage that its glue uses, or that cross to the next stage."""
        leaving = crossed[stage] if stage < len(crossed) else ()
        own = [n for n in range(self.held) if stage in self.values[n].stages]
        return frozenset(n for n in own if n in leaving or stage in self.values[n].uses)

    def blame(self, error: Exception) -> Exception:
        """The error to raise instead of `error`, if assumed shapes may have caused it."""
        if not self.assumed or isinstance(error, InputError):
            return error
        last = extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return bad(
            f"a forward that fails in {last.name} ({place}: {type(error).__name__}: {error}) where "
            f"{', '.join(dict.fromkeys(self.assumed))}, which cannot run on the meta device, were "
            "assumed to return a tensor like their first",
            "layers whose output shapes follow from their input shapes, or equal the first input's",
            "pp1, or layers that return one tensor of the shape of their input",
        )

    def _unknown(self, func: Any, inputs: Sequence[Tensor]) -> InputError:
        known = [n for x in inputs if (n := self.seen.number(x)) is not None]
        origin = self.values[known[0]].origin
        return bad(
            f"{name_of(func)} of a tensor that comes from {origin}, in {line()}",
            "operations between layers that compute tensors of known shapes from tensors",
            "the same operation inside a layer (any nn.Module with parameters), or after the step",
        )


# --- on meta ---------------------------------------------------------------------------------


def _replaced(tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    left = iter(tensors)
    return mapped(lambda _: next(left), (args, kwargs), Tensor)


def _settled(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run the layer; modules that read values of activations are assumed to keep their shape."""
    try:
        return layer(*args, **kwargs)
    except RuntimeError:
        if "forward" in vars(layer):
            raise
    for module in layer.modules():
        _settle(module)
    return layer(*args, **kwargs)


def _settle(module: nn.Module) -> None:
    """Let a failing forward of a module of the twin return its input's shape. The tokens routed to
    experts are not known on meta. The rank that owns the layer compares the real shapes (stage.py).
    """
    forward = module.forward

    @wraps(forward)
    def assumed(*args: object, **kwargs: object) -> Any:
        """The module's output; if it fails, an empty tensor like its first input."""
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError):  # of a part's assumed shape
            inputs = leaves((args, kwargs), Tensor)
            if not inputs:
                raise
        out, trained = torch.empty_like(inputs[0], device=META), [*inputs, *module.parameters()]
        if torch.is_grad_enabled() and out.is_floating_point():
            # cloned: an output is not a leaf, and may be written to
            return out.requires_grad_(any(x.requires_grad for x in trained)).clone()
        return out

    vars(module)["forward"] = assumed


def _staying(func: Any, args: Any) -> tuple[Any, Any]:
    if func in _MOVES:
        return Tensor.to, (args[0], META)
    if func is Tensor.to:
        return func, tuple(META if isinstance(x, str) else x for x in args)
    return func, args
