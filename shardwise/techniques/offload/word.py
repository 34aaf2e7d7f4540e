"""The plan word `offload`: which states rest in host memory, and when they are updated there.

The table at the end has its values. A fraction selects the fewest units at the end of the model,
whose gradients come first. engine/checks/device_room.py chooses for `auto`. (Delayed parameter
update: ZeRO-Offload, arXiv 2101.06840, section 5.2, with 40 steps before it.)
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.plan.words import MOST, Technique, Word, keyed
from shardwise.core.tools.arguments import suggest
from shardwise.core.zero import Tier

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

WHAT: Final = ("optim", "param", "optim-delayed", "optim@disk", "param@disk", "auto")
#: An example of a word with a fraction of the parameters.
BY_FRACTION: Final = "optim=0.5"
#: Steps before updates are delayed.
UNDELAYED_STEPS: Final = 40
_SHARE: Final = re.compile(r"[01]|[01]?\.[0-9]{1,15}")
#: Other names of the tiers, for suggestions.
_HOSTS: Final = ("host", "cpu", "ram", "memory")
_DISKS: Final = ("disk", "nvme", "ssd", "file")
_PARAM_TIERS: Final[dict[str, Tier]] = {"param": "host", "param@disk": "disk"}


@dataclass(frozen=True)
class Offload:
    """A parsed value of the word; "auto" is not chosen yet, and leaves all on the device.

    what        "param" moves parameters too, never further away than their optimizer's state
    undelayed   the number of steps before updates are made one step late; None: never
    share       the fraction of the trained parameters, at least, whose states leave the device
    """

    what: str
    undelayed: int | None = None
    share: float = 1.0

    @property
    def param_tier(self) -> Tier:
        return _PARAM_TIERS.get(self.what, "device")

    @property
    def optim_tier(self) -> Tier:
        """The tier of the optimizer's state, if that is the same for all units."""
        if self.what == "auto":
            return "device"
        return "disk" if self.on_disk else "host"

    @property
    def on_disk(self) -> bool:
        return self.what.endswith("@disk")

    @property
    def by_unit(self) -> bool:
        return self.share < 1

    def delays(self, step: int) -> bool:
        """Whether the update of step number `step`, from 0, is used one step later."""
        return self.undelayed is not None and step >= self.undelayed

    def tiers(self, numels: Sequence[int]) -> list[Tier]:
        """The tier of the optimizer's state of each unit, by the numbers of trained parameters."""
        on_host = _first(self.share, numels)
        return ["device" if k < on_host else "host" for k in range(len(numels))]

    def __str__(self) -> str:
        if self.by_unit:
            return f"{self.what}={share_text(self.share)}"
        if self.undelayed is None:
            return self.what
        number = "" if self.undelayed == UNDELAYED_STEPS else f"={self.undelayed}"
        return f"{self.what}-delayed{number}"


def parse(text: str) -> Offload:
    """The value of `offload:` as written. Raises InputError for any other."""
    what, equals, number = text.partition("=")
    if text in ("optim", "param", "optim@disk", "param@disk", "auto"):
        return Offload(text)
    if what == "optim-delayed":
        return Offload("optim", _steps(number) if equals else UNDELAYED_STEPS)
    if what == "optim":
        return Offload("optim", share=_share(number))
    words = ", ".join([*WHAT, BY_FRACTION])
    allowed = f"offload: and the states that rest in host memory or on disk: {words}"
    raise bad(f"the plan word 'offload:{text}'", allowed, f"offload:{_nearest(text)}")


def share_text(share: float) -> str:
    """A fraction as the word has it, without an exponent: "0.5", "0.00001"."""
    return f"{share:.15f}".rstrip("0").removesuffix(".") if share < 1 else "1"


def _first(share: float, numels: Sequence[int]) -> int:
    wanted, found, first = share * sum(numels), 0, len(numels)
    while first and found < wanted:
        first -= 1
        found += numels[first]
    return first


def _nearest(text: str) -> str:
    what, at, tier = text.partition("@")
    word = suggest(what, ("optim", "param", "optim-delayed", "auto"), 0.5)
    disk = (at and tier not in _HOSTS) or (not word and text in _DISKS)
    word = word or "optim"
    return f"{word}@disk" if disk and word in ("optim", "param") else word


def _share(text: str) -> float:
    if _SHARE.fullmatch(text) and 0 < float(text) <= 1:
        return float(text)
    raise bad(
        f"the plan word 'offload:optim={text}'",
        "a fraction of the parameters, above 0 and at most 1; without the word all stay",
        f"offload:{BY_FRACTION}",
    )


def _steps(text: str) -> int:
    if text.isdecimal() and len(text) < 11 and int(text) <= MOST:
        return int(text)
    raise bad(
        f"the plan word 'offload:optim-delayed={text}'",
        f"a number of steps from 0 to {MOST}, after which updates are delayed",
        f"offload:optim-delayed={UNDELAYED_STEPS}",
    )


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    """Parameters in host memory under a row whose update makes only a block of them."""
    gather = plan.offloaded_states.moves().gather
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
                ("offload:optim=0.6", "the same for the last units with 60 % of the parameters"),
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
