"""The plan word `offload`: which states rest in host memory, and when they are updated there.

The table at the end has its values. engine/checks/device_room.py chooses for `auto`. (Delayed
parameter update: ZeRO-Offload, arXiv 2101.06840, section 5.2, with 40 steps before it.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.plan.words import MOST, Technique, Word, keyed
from shardwise.core.tools.arguments import suggest
from shardwise.core.zero import Tier

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

WHAT: Final = ("optim", "param", "optim-delayed", "optim@disk", "param@disk", "auto")
#: Steps before updates are delayed.
UNDELAYED_STEPS: Final = 40
_PARAM_TIERS: Final[dict[str, Tier]] = {"param": "host", "param@disk": "disk"}


@dataclass(frozen=True)
class Offload:
    """A parsed value of the word; "auto" is not chosen yet, and leaves all on the device.

    what        "param" moves parameters too, never further away than their optimizer's state
    undelayed   the number of steps before updates are made one step late; None: never
    """

    what: str
    undelayed: int | None = None

    @property
    def param_tier(self) -> Tier:
        return _PARAM_TIERS.get(self.what, "device")

    @property
    def optim_tier(self) -> Tier:
        if self.what == "auto":
            return "device"
        return "disk" if self.on_disk else "host"

    @property
    def on_disk(self) -> bool:
        return self.what.endswith("@disk")

    def delays(self, step: int) -> bool:
        """Whether the update of step number `step`, from 0, is used one step later."""
        return self.undelayed is not None and step >= self.undelayed

    def __str__(self) -> str:
        if self.undelayed is None:
            return self.what
        number = "" if self.undelayed == UNDELAYED_STEPS else f"={self.undelayed}"
        return f"{self.what}-delayed{number}"


def parse(text: str) -> Offload:
    """The value of `offload:` as written. Raises InputError for any other."""
    what, equals, number = text.partition("=")
    if text in WHAT and text != "optim-delayed":
        return Offload(text)
    steps = number if equals else str(UNDELAYED_STEPS)
    if what == "optim-delayed" and len(steps) < 11 and steps.isdecimal() and int(steps) <= MOST:
        return Offload("optim", int(steps))
    allowed = f"offload: and the states that rest in host memory or on disk: {', '.join(WHAT)}"
    raise bad(f"the plan word 'offload:{text}'", allowed, f"offload:{suggest(text, WHAT)}")


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    """Parameters in host memory under a row whose update makes only a block of them."""
    gather = plan.states.moves().gather
    if gather is None or gather.src_tier == "device":
        return
    given = f"'offload:{plan.offload}' with {plan.row}, which keeps all parameters on every rank "
    given += "and updates a block on each: the blocks would be gathered in host memory"
    allowed = "zero3, which keeps a block of them; ddp, which updates all; or offload:optim"
    yield Problem(given, allowed, f"'{replace(plan, row='zero3')}'")


def _beside_layers(plan: "Plan") -> str:
    every = (own.offload for own in plan.of_all_layers)
    other = (word for word in every if word not in (None, "optim", "param"))
    return next((f"'offload:{word}'" for word in other), "")


TECHNIQUE: Final = Technique(
    words=(
        Word(
            "offload:WHAT",
            "offload:optim",
            "states rest outside of the device",
            values=(
                ("offload:optim", "gradients and optimizer states in host memory, updated there"),
                (
                    "offload:optim-delayed",
                    "updates run beside the next step, after the first 40 steps",
                ),
                ("offload:optim-delayed=N", "the same after the first N steps"),
                ("offload:param", "parameters rest in host memory too"),
                ("offload:optim@disk", "gradients and optimizer states rest on a disk"),
                ("offload:param@disk", "parameters rest on the disk too"),
                ("offload:auto", "the least in host memory that fits into device_memory"),
            ),
            of_layers=True,
        ),
    ),
    fields=(keyed("offload", "choice of offload", lambda text: str(parse(text))),),
    problems=_problems,
    beside_layers=_beside_layers,
)
