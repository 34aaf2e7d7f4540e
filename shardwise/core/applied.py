"""What the engine asks of a technique that is applied to a model.

    begin(batch, parts)    a step or an evaluation begins
    enter(part)            the forward of a microbatch begins
    during(device)         around a forward or a backward pass
    end()                  its passes have run

An engine holds a list of these, in the order in which they were applied, and names none.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Protocol

#: A context that does nothing.
NOTHING: Final = nullcontext()


class Applied(Protocol):
    """A technique on one rank's model; what a technique does not define does nothing."""

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        """A step on `batch` begins, or an evaluation; returns the parts of it to compute.

        Called by all ranks.
        """
        return parts

    def enter(self, part: Any) -> None:
        """The forward of this part begins."""

    def during(self, device: Any) -> AbstractContextManager[None]:
        """Around the forward or the backward pass of a part on a `torch.device`."""
        return NOTHING

    def end(self, *, trains: bool) -> None:
        """All passes of the step, or of the evaluation, have run."""


@contextmanager
def during(applied: Sequence[Applied], device: Any) -> Generator[None]:
    """Around a forward or a backward pass under all of these."""
    with ExitStack() as entered:
        for each in applied:
            entered.enter_context(each.during(device))
        yield
