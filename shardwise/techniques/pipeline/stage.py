"""Runs one stage of a model on one microbatch: the user's forward, with other stages skipped.

    rank of stage 1     embed  blocks.0 | blocks.1  blocks.2 | head  loss
                        skipped         | computed           | never reached
                                 received -^           outputs -^

Every rank runs the user's `call(model)` on the whole microbatch. *Layers* (placeholders.py) are
computed by their owners. All else is *glue* (interceptor.py): the operations between them, which
belong to the stage of the layer called last. Glue on the batch, buffers and constants alone is
*common*: every rank computes it. Outputs of layers, and tensors computed from them, are *values*,
numbered in the order of creation, which is the same on every rank.

The trace (tracer.py) lists the events of the forward: calls of layers, and operations on values.

    an event of an earlier stage      is skipped: its output is *absent*, a tensor on meta, or the
                                      tensor received for that value
    an event of this stage            is computed, with received tensors for values of earlier ones
    a layer of a later stage          ends the stage: the exception `Over` leaves the user's code
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.core.errors import InputError, bad
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.pipeline.stage_io import ForwardStep, StageTrace
from shardwise.techniques.pipeline.trace.interceptor import Of, Seen, line, name_of

#: What acts on the gradient of a value: done by the stage that the glue belongs to, by no other.
_HOOKS: Final = frozenset(
    (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
)
#: The output of a read whose answer is not known yet.
UNKNOWN: Final = "unknown"
#: Arguments that hold no tensor.
_PLAIN: Final = (bool, int, float, str, torch.dtype, torch.device)


class Over(BaseException):
    """A layer of a later stage was called. No `except Exception` of a user's forward stops it."""


class Asked(BaseException):
    """The last event of an unfinished trace, a read of an activation, has its `answer`."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


class Unanswered(Exception):  # noqa: N818
    """In a dry run, the rank that has the tensor of a read does not answer."""


@dataclass
class Ran:
    """The result of a stage: the contiguous tensors for later stages; of the last, `call`'s."""

    outputs: list[Tensor] = field(default_factory=list)
    result: Any = None


class Stage:
    """One stage while it runs; `own` are its parameters and buffers by number."""

    def __init__(
        self, stage: int, trace: StageTrace, seen: Seen, own: Mapping[int, Tensor]
    ) -> None:
        self.stage, self.trace, self.seen, self.own = stage, trace, seen, own
        self.at = self.index = 0  # the stage that the glue belongs to; the next event
        self.here = set(own)  # values of this stage
        self.received: dict[int, Tensor] = {}  # the real tensors of earlier stages' values
        self.last = len(trace.written) - 1
        self.crossing: Sequence[int] = () if stage >= self.last else trace.crossing[stage]
        self.leaving = set(self.crossing)
        self.made: dict[int, Tensor] = {}  # the outputs so far
        self.over = False  # whether a layer of a later stage was called

    def take(self, received: Sequence[Tensor]) -> None:
        """Take the received tensors for the values that cross to this stage."""
        numbers = self.trace.crossing[self.stage - 1] if self.stage else ()
        for number, x in zip(numbers, received, strict=True):
            order = self.trace.orders.get(number)
            if order is not None:  # it was sent in memory order
                x = x.permute([order.index(dim) for dim in range(x.dim())])
            if number in self.trace.written[self.stage]:
                x = x.clone()  # a leaf cannot be written to, and the sender may still read it
            self.received[number] = x
            self.seen.put(x, number)

    # --- operations and layers ----------------------------------------------------------------

    def without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on values."""
        event = self._next()
        if event is None or event.what != func:
            return self._ask(func, args, kwargs)
        self.index += 1
        if event.stage < self.stage:
            return self._skip(event, args, kwargs)
        was = (args, kwargs) if event.writes else None
        args, kwargs = self._real(args, kwargs)
        out = func(*args, **kwargs)
        if event.reads:
            self._answer(event, out)
        return self._note(event, out, was, (args, kwargs))

    def _answer(self, event: ForwardStep, out: Any) -> None:
        if event.out is UNKNOWN:
            raise Asked(out)
        if repr(out) != repr(event.out):
            raise bad(
                f"{name_of(event.what)} of an activation in {line()}, which gives {out!r}, and "
                f"gave {event.out!r} for the microbatch that was traced",
                "reads of activations between layers that give the same for every microbatch",
                "torch.where(condition, a, b) in place of if, or the same code inside a layer",
            )

    def layer(self, of: Of, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a layer. Raises Over for a layer of a later stage."""
        event = self._next()
        if event is None or event.what != of.name:
            raise self._other_way(of.name)
        if event.stage > self.stage:
            self.over = True
            raise Over
        self.index += 1
        self.at = event.stage
        if event.stage < self.stage:
            return self._skip(event, args, kwargs)
        was = (args, kwargs) if event.writes else None
        args, kwargs = self._real(args, kwargs)
        assert of.real is not None
        out = of.real(*args, **kwargs)
        if self.leaving:
            self._compare(event, out)
        return self._note(event, out, was, (args, kwargs))

    def _next(self) -> ForwardStep | None:
        events = self.trace.events
        return events[self.index] if self.index < len(events) else None

    def _ask(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that is not an event: it returns no tensor, but a shape or a dtype."""
        if func in _HOOKS and (self.at < self.stage or not torch.is_grad_enabled()):
            graph = torch.empty(0, dtype=torch.float32, device="meta", requires_grad=True)
            return func(graph, *args[1:], **kwargs)
        out = func(*args, **kwargs)
        if _leaves(out):
            raise self._other_way(getattr(func, "__name__", str(func)))
        return out

    # --- before our stage ---------------------------------------------------------------------

    def _skip(self, event: ForwardStep, args: Any, kwargs: Any) -> Any:
        if event.writes:
            tensors = leaves((args, kwargs), Tensor)
            for i, number in event.writes:
                self.seen.put(tensors[i], number)
        if isinstance(event.out, Tensor):
            return self._absent(event.numbers[0], event.out)
        numbers = iter(event.numbers)
        return mapped(lambda x: self._absent(next(numbers), x), event.out, Tensor)

    def _absent(self, number: int, like: Tensor) -> Tensor:
        """The tensor in place of a value of an earlier stage: the received one, or one on meta."""
        trained = number in self.trace.trained
        inside = trained and not torch.is_grad_enabled()  # of an autograd.Function, which marks
        if number in self.received and not inside:  # what it gives as its own: ours stays a leaf
            return self.received[number]
        x = like.detach()
        if trained:
            x.requires_grad_()
        self.seen.put(x, number)
        return x

    # --- in our stage -------------------------------------------------------------------------

    def _real(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._ready(args):
            args = mapped(self._at_hand, args, Tensor)
        if kwargs and not self._ready(kwargs.values()):
            kwargs = mapped(self._at_hand, kwargs, Tensor)
        return args, kwargs

    def _ready(self, values: Iterable[Any]) -> bool:
        """Whether no argument is absent: a fast check, which is true for nearly all operations."""
        for x in values:
            if isinstance(x, Tensor):
                if self._at_hand(x) is not x:
                    return False
            elif not (x is None or isinstance(x, _PLAIN)):
                return False
        return True

    def _at_hand(self, x: Tensor) -> Tensor:
        number = self.seen.number(x)
        if number is None:
            return x
        received = self.received.get(number)
        if received is not None:
            return received
        if number not in self.here:
            raise self._other_way("a value of an earlier stage")
        return self.own.get(number, x)

    def _note(self, event: ForwardStep, out: Any, was: Any, done: Any) -> Any:
        tensors = _leaves(out)
        if len(tensors) != len(event.numbers):
            raise self._other_way(f"{len(tensors)} tensors from {event.what}")
        for x, number in zip(tensors, event.numbers, strict=True):
            self._have(x, number)
        if was is not None:
            before, after = leaves(was, Tensor), leaves(done, Tensor)
            for i, number in event.writes:
                self._have(after[i], number)
                self.seen.put(before[i], number)
                if before[i] is not after[i]:  # the user's variable is still the absent tensor
                    self.received[number] = after[i]
        return out

    def _have(self, x: Tensor, number: int) -> None:
        self.seen.put(x, number)
        self.here.add(number)
        if number in self.leaving:
            self.made[number] = x

    def _compare(self, event: ForwardStep, out: Any) -> None:
        foreseen = [(x.shape, x.dtype) for x in _leaves(event.out)]
        found = [(x.shape, x.dtype) for x in _leaves(out)]
        if found != foreseen:
            raise bad(
                f"{event.what}, which returns {_said(found)}, and {_said(foreseen)} on meta",
                "layers whose outputs have shapes that follow from those of their inputs",
                "a start that is not between this layer and the next one that uses its output",
            )

    @contextmanager
    def writing(self, containers: Sequence[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
        """At the end, buffers outside of layers have this stage's writes, or their old values."""
        tables = [container._buffers for container, _ in containers]
        before = [dict(table) for table in tables]
        try:
            yield
        finally:
            for table, old in zip(tables, before, strict=True):
                self._settle(table, old)

    def _settle(self, table: dict[str, Tensor | None], old: Mapping[str, Tensor | None]) -> None:
        for key, b in table.items():
            number = None if b is None else self.seen.number(b)
            if b is None or number is None or (number in self.here and number not in self.received):
                continue
            real = self.received.get(number)
            if b is not old.get(key):  # assigned, in an earlier stage if it is not received
                table[key] = old.get(key) if real is None else real.detach()
            elif real is not None and real is not b:
                b.data.copy_(real)

    def end(self) -> None:
        event = self._next()
        if not self.over and (event is not None or self.stage < self.last):
            raise self._other_way("its end")

    def outputs(self) -> list[Tensor]:
        """The tensors for the next stage, in the order of the bundle, with dims in memory order."""
        found: list[Tensor] = []
        specs = self.trace.bundles[self.stage] if self.crossing else ()
        for number, spec in zip(self.crossing, specs, strict=True):
            x = self.made.get(number)
            if x is None:  # passed on, or a parameter
                x = self.received[number] if number in self.received else self.own[number]
                x = x.view_as(x)
            if torch.is_grad_enabled() and x.requires_grad != spec.requires_grad:
                if x.requires_grad:
                    raise self._other_way(f"requires_grad={x.requires_grad} of value {number}")
                x = x.detach().requires_grad_()  # of what was frozen later: it ends here
            order = self.trace.orders.get(number)
            found.append((x if order is None else x.permute(order)).contiguous())
            if found[-1].shape != spec.shape or x.dtype != spec.dtype:
                raise self._other_way(f"{_said([(x.shape, x.dtype)])} for value {number}")
        return found

    def _other_way(self, what: str) -> InputError:
        event = self._next()
        return bad(
            f"a forward that reached {what} in stage {self.stage}, in {line()}, where its trace "
            f"has {getattr(event.what, '__name__', event.what) if event else 'its end'}",
            "a forward that runs the same operations for the same shapes, each time, on all ranks",
            "random choices of layers, and work of the first call only, inside of layers",
        )


def _leaves(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else leaves(out, Tensor)


def _said(tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in tensors) or "no tensors"
