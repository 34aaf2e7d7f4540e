"""What the engine asks of a technique that is applied to a model.

    divided(model)         the model has only the layers of this rank's stages
    install(model)         parameters are flat, and all other hooks are set
    during(device)         around a forward or a backward pass
    end()                  its passes have run

An engine holds a list of techniques, in the order in which they were applied (engine/build.py), and
names none of them.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Protocol

from shardwise.core.layouts.param_layout import Groups

#: Called with a parameter's full name and the tensor to write its initial weights to.
Fill = Callable[[str, Any], None]
#: A context that does nothing.
NOTHING: Final = nullcontext()


class Applied(Protocol):
    """A technique on one rank's model; what a technique does not define does nothing.

    mixes   whether this rank computes rows or positions of other data ranks
    skips   set by the engine: whether a step whose numbers are not finite is skipped, or raises
    """

    mixes: bool = False
    skips: bool = False

    def axes(self) -> Iterable[Any]:
        """The `Axis` of each axis that the technique adds to those of the mesh."""
        return ()

    def sums(self) -> Mapping[tuple[str, Groups], Any]:
        """This rank's `Axis` for each axis and groups of its ranks that sum gradients."""
        return {}

    def same_batch(self) -> Iterable[Any]:
        """The `Axis` of each axis, besides those of the mesh, whose ranks have the same batch."""
        return ()

    def divided(self, model: Any) -> None:
        pass

    def install(self, model: Any) -> None:
        pass

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        """All ranks begin a step on `batch`, or an evaluation; returns the parts to compute."""
        return parts

    def weight(self, count: float, part: Any, tokens: Callable[[Any], float] | None) -> float:
        """The number of tokens that the loss of a part is the mean of, after `begin`.
        `count` is that of the part that it replaced; `tokens` is the user's function.
        """
        return count

    def enter(self, part: Any, model: Any, own: Any) -> Any:
        """The forward of `model` on this part begins; returns the part that `begin` replaced.
        `model` is the engine's, or a copy whose loss is compared with that of the plain model.
        `own` is the part, or a copy of it to which the forward may write.
        """
        return part

    def during(self, device: Any) -> AbstractContextManager[None]:
        return NOTHING

    def end(self, *, trains: bool) -> None:
        pass


@contextmanager
def during(applied: Sequence[Applied], device: Any) -> Generator[None]:
    with ExitStack() as entered:
        for each in applied:
            entered.enter_context(each.during(device))
        yield
