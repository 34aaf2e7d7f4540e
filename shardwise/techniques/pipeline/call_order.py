"""The order in which the modules of a model are called, found before there is a batch.

    definition   image.*  text.*  head           the loss of a program calls
    calls        text.*  image.*  head           m.image(...) after m.text(...)

A pipeline is cut when it is built, so the loss runs once on a copy of the model without values. Its
inputs are one object that stands for everything: any operation on it, and any part of it, is that
object again. A module whose code stops at it (it needs a number, or a shape) counts as calling its
submodules in the order of definition, and returns that object too. `if` takes one answer
everywhere; of the passes with both answers, the one that fewer modules stopped counts.
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.core.errors import InputError
from shardwise.core.tools.hook import in_place_of
from shardwise.techniques.pipeline.trace.placeholders import Calls, defined, twin

#: More questions than this in one pass come from a loop that does not end.
_QUESTIONS: Final = 100_000


_DEVICE, _DTYPE = (getattr(Tensor, name).__get__ for name in ("device", "dtype"))


class Anything(Tensor):
    """Stands for every input of a pass, and for all that is computed from it."""

    answer: bool
    asked: int
    one: "Anything"

    @classmethod
    def answering(cls, answer: bool) -> "Anything":
        """The object of one pass, whose class has the answer of its `if`s."""
        own: Any = type(cls.__name__, (cls,), {"answer": answer, "asked": 0})
        # a number without dims: torch takes it for integers and booleans too
        own.one = torch.ones((), dtype=torch.int64, device="cpu").as_subclass(own)
        return own.one

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return torch.device("meta")
        if func == _DTYPE:
            return torch.get_default_dtype()
        return cls.one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        own = type(self)
        own.asked += 1
        if own.asked > _QUESTIONS:
            raise RuntimeError("a loop that does not end")
        return own.answer

    def __add__(self, _: Any) -> Any:  # of a tuple too
        return self

    def __radd__(self, _: Any) -> Any:
        return self

    def __repr__(self, **_: Any) -> str:
        return "anything"

    def __format__(self, _: str) -> str:
        return "anything"

    def __contains__(self, _: Any) -> bool:
        return bool(self)

    def __iter__(self) -> Iterator[Any]:
        return iter([self] * _unpacked(inspect.currentframe()))

    def __len__(self) -> int:
        return 1

    def __index__(self) -> int:
        return 1

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __hash__(self) -> int:
        return id(type(self))

    def keys(self) -> list[str]:
        """None: as keywords, nothing is passed."""
        return []


def _unpacked(frame: FrameType | None) -> int:
    """How many values the code that iterates takes: `a, b = x` takes two."""
    caller = frame.f_back if frame else None
    if caller is None:
        return 1
    for each in dis.get_instructions(caller.f_code):
        if each.offset == caller.f_lasti and each.opname == "UNPACK_SEQUENCE":
            return int(each.arg or 1)
    return 1


class LossRun:
    """One pass over a copy of a model: the calls of each module, and how many stopped. `pair`: the
    batch is a pair, which `torch.cat(batch)` takes.
    """

    def __init__(
        self,
        original: nn.Module,
        loss: Callable[..., Any] | None,
        *,
        answer: bool = False,
        pair: bool = False,
    ) -> None:
        self.anything, self.stopped, model = Anything.answering(answer), 0, twin(original)
        self.calls = {module: list[int]() for module in model.modules()}
        self.number = 0
        for module in self.calls:
            vars(module)["forward"] = self._guarded(module, module.forward)
        with in_place_of(original, model):
            try:
                if loss is not None:
                    loss(model, (self.anything,) * 2 if pair else self.anything)
            except Exception:  # noqa: BLE001  # of the program's code, which meets no real batch
                self.stopped += 1
            self.reached = self.number > 0  # the loss called a module
            if not (self.reached or pair):
                model(*self._inputs(type(model)))

    def _inputs(self, kind: type[nn.Module]) -> list[Any]:
        known = [*inspect.signature(kind.forward).parameters.values()][1:]
        needed = [p for p in known if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        return [self.anything] * len(needed)

    def _guarded(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            """The output of the module, or the object that stands for everything."""
            began = self.number
            self._note(module)
            try:
                return forward(*args, **kwargs)
            except Exception:  # noqa: BLE001  # as above
                inside = [part for part in module.modules() if part is not module]
                self.stopped += bool(inside)
                for part in inside:
                    if not self.calls[part] or self.calls[part][-1] < began:
                        self._note(part)
                return self.anything

        return call

    def _note(self, module: nn.Module) -> None:
        self.calls[module].append(self.number)
        self.number += 1


def calls_of(model: nn.Module, loss: Callable[..., Any] | None = None) -> Calls:
    """The places of the calls of each module, by all its names, in a run of `loss(model, batch)`. A
    module that is not called follows the one before it in the order of definition.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            found = LossRun(model, loss)
        except InputError:  # it cannot be copied, so no pipeline can be cut from it
            return defined(model)
        if found.stopped:
            other = LossRun(model, loss, answer=True)
            found = min(found, other, key=lambda run: run.stopped)
        if not found.reached:
            pair = LossRun(model, loss, pair=True)
            found = pair if pair.reached else found
    calls = dict(zip(model.modules(), found.calls.values(), strict=True))
    places: dict[str, tuple[int, ...]] = {}
    last = 0
    for name, module in model.named_modules(remove_duplicate=False):
        called = calls[module] or [place for part in module.modules() for place in calls[part]][:1]
        places[name] = tuple(called) or (last,)
        last = places[name][0]
    return places
