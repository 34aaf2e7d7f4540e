"""The plan word `offload`: which states rest in host memory, and when they are updated there.

offload:optim             the optimizer's state and masters; gradients go there, the update is
                          made there, and the updated parameters come back
offload:param             parameters too: each unit is copied to the device before it is used
"""

from dataclasses import dataclass
from typing import Final

from shardwise.core.errors import bad
from shardwise.core.zero import Tier

#: What may rest in host memory.
WHAT: Final = ("optim", "param")


@dataclass(frozen=True)
class Offload:
    """A parsed value of the word.

    what    "optim" or "param": parameters never rest further away than their optimizer's state
    """

    what: str

    @property
    def param_tier(self) -> Tier:
        """The tier of parameters between two uses."""
        return "host" if self.what == "param" else "device"

    @property
    def optim_tier(self) -> Tier:
        """The tier of the optimizer's state, where the update is made."""
        return "host"

    def __str__(self) -> str:
        return self.what


def parse(text: str) -> Offload:
    """The value of `offload:` as written. Raises InputError for any other."""
    if text in WHAT:
        return Offload(text)
    allowed = f"offload: and the states that rest in host memory: {' or '.join(WHAT)}"
    raise bad(f"the plan word 'offload:{text}'", allowed, f"offload:{WHAT[0]}")
