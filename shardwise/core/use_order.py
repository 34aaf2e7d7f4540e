"""The order in which units are used, pass after pass.

pass before     0 1 2 3 2          its path
way             0 1 2 3            each unit once
this pass       0 1 .              2 follows 1 if this pass takes the same path

A use of a unit may be several calls of its modules.  The backward pass reverses the calls.
"""

from typing import Generic, TypeVar

#: The most uses to remember if no backward pass follows.
LONGEST = 2**16

U = TypeVar("U")


class Way(Generic[U]):
    """The order of uses, and the position of the current pass in it.

    used    each use of a unit since the last backward pass
    calls   the unit of each call of a module, in the same passes
    over    whether the next use is the first one again
    path    the uses before the last backward pass
    once    the same, each unit once
    back    the calls before the last backward pass, in the order of that backward pass
    """

    def __init__(self) -> None:
        self.used: list[U] = []
        self.calls: list[U] = []
        self.over = False
        self.path: list[U] = []
        self.once: list[U] = []
        self.back: list[U] = []

    def use(self, unit: U) -> None:
        """Record a use, which begins with a call."""
        if self.over or len(self.used) == LONGEST:
            self.used, self.calls, self.over = [], [], False
        self.used.append(unit)
        self.calls.append(unit)

    def following(self, ahead: int) -> list[U]:
        """The next `ahead` units if this pass follows the previous path, else none."""
        place = len(self.used)
        follows = self.path[place - 1 : place] == self.used[-1:]
        return self.path[place : place + ahead] if follows else []

    def learn(self) -> bool:
        """Begin a backward pass and store the path; returns whether the path is new."""
        self.over = True
        self.back = self.calls[::-1]
        if self.used == self.path:
            return False
        self.path, self.once = list(self.used), list(dict.fromkeys(self.used))
        return True
