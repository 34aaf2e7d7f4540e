"""The order in which units are used, pass after pass.

previous pass   0 1 2 3 2
distinct        0 1 2 3            each unit once
this pass       0 1 .              2 comes next if this pass repeats the previous one

A use of a unit may be several calls of its modules.  The backward pass reverses the calls.
"""

from typing import Generic, TypeVar

#: The most uses to remember if no backward pass follows.
LONGEST = 2**16

U = TypeVar("U")


class UseOrder(Generic[U]):
    """The order of uses, and the position of the current pass in it.

    used             each use of a unit since the last backward pass
    calls            the unit of each call of a module, in the same passes
    ended            whether the next use begins a new pass
    previous         the uses before the last backward pass
    distinct         the same, each unit once
    backward_calls   the calls before the last backward pass, in reverse
    """

    def __init__(self) -> None:
        self.used: list[U] = []
        self.calls: list[U] = []
        self.ended = False
        self.previous: list[U] = []
        self.distinct: list[U] = []
        self.backward_calls: list[U] = []

    def use(self, unit: U) -> None:
        """Record a use, which begins with a call."""
        if self.ended or len(self.used) == LONGEST:
            self.used, self.calls, self.ended = [], [], False
        self.used.append(unit)
        self.calls.append(unit)

    def following(self, ahead: int) -> list[U]:
        """The next `ahead` units if this pass repeats the previous one, else none."""
        place = len(self.used)
        follows = self.previous[place - 1 : place] == self.used[-1:]
        return self.previous[place : place + ahead] if follows else []

    def begin_backward(self) -> bool:
        """Begin a backward pass and store the order; returns whether it is new."""
        self.ended = True
        self.backward_calls = self.calls[::-1]
        if self.used == self.previous:
            return False
        self.previous, self.distinct = list(self.used), list(dict.fromkeys(self.used))
        return True
