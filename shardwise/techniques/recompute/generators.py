"""Replays the random numbers of the forward pass in a recomputation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

States = list[Tensor]


class Generator(Protocol):
    """What draws numbers: a torch.Generator, or a count of which numbers are a function."""

    def get_state(self) -> Tensor:
        """The state that determines the numbers that follow."""
        ...

    def set_state(self, state: Tensor, /) -> object:
        """Return to a state."""
        ...


class Generators:
    """The generators from which modules draw."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self.generators = list(generators)

    def states(self) -> States:
        """The states of all generators."""
        return [generator.get_state() for generator in self.generators]

    def set(self, states: States) -> None:
        """Set the states of all generators."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    @contextmanager
    def replay(self, states: States) -> Iterator[None]:
        """Draw from `states` inside; afterwards restore the states from before."""
        before = self.states()
        self.set(states)
        try:
            yield
        finally:
            self.set(before)
