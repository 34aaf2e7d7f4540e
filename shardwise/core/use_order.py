"""The order in which units are used, pass after pass.

pass before     0 1 2 3 2          its path, of which the backward pass goes back along the way
way             0 1 2 3            each unit once
this pass       0 1 .              after 1 comes 2, as long as it takes the same path
"""

from typing import Generic, TypeVar

#: Uses of units that are kept in mind where no backward pass ever comes.
LONGEST = 2**16

U = TypeVar("U")


class Way(Generic[U]):
    """What is known of the order, and where in it a pass is.

    used    each use of a unit since the last backward pass
    over    whether the next use is the first one again
    path    the uses before the last backward pass
    once    the same, each unit once
    """

    def __init__(self) -> None:
        self.used: list[U] = []
        self.over = False
        self.path: list[U] = []
        self.once: list[U] = []

    def use(self, unit: U) -> None:
        """Take note of a use."""
        if self.over or len(self.used) == LONGEST:
            self.used, self.over = [], False
        self.used.append(unit)

    def following(self, ahead: int) -> list[U]:
        """The units to be used next, where this pass has taken the path of the one before."""
        place = len(self.used)
        here = self.path[place - 1 : place] == self.used[-1:]
        return self.path[place : place + ahead] if here else []

    def learn(self) -> bool:
        """A backward pass begins: the next forward takes the same path.  Whether it is new."""
        self.over = True
        if self.used == self.path:
            return False
        self.path, self.once = list(self.used), list(dict.fromkeys(self.used))
        return True
