"""The plan word `offload`: which states rest in host memory, and when they are updated there.

    offload:optim             the optimizer's state and masters; gradients go there, the update is
                              made there, and the updated parameters come back
    offload:optim=0.6         the same for some units: the fewest at the end of the model, whose
                              gradients come first, that have this fraction of its parameters
    offload:param             parameters too: each unit is copied to the device before it is used
    offload:auto              the least of these with which a step is predicted to fit the device
                              (engine/offload_choice.py), before any of it is made
    offload:optim-delayed     as optim, but an update is made beside the next step, and its
                              parameters are used one step later; not in the first steps
    offload:optim-delayed=N   the first N steps are not delayed (the default: 40)
    offload:optim@disk        the optimizer's state, masters and gradients rest on a disk, from
                              where they are streamed through host memory for the update
    offload:param@disk        parameters too: each unit is streamed to the device before it is used
    offload:optim=0.9,disk=0.5
                              three tiers: states of 0.9 of the parameters leave the device, of
                              these those of 0.5 for a disk; `optim,disk=0.5`: all leave it

(Delayed parameter update: ZeRO-Offload, arXiv 2101.06840, section 5.2, with 40 steps before it.)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.core.errors import bad
from shardwise.core.suggest import suggest
from shardwise.core.zero import Tier

#: What may rest in host memory, or on a disk; and the choice by prediction.
WHAT: Final = ("optim", "param", "optim-delayed", "optim@disk", "param@disk", "auto")
#: Examples of words with fractions of the parameters.
BY_FRACTION: Final = ("optim=0.5", "optim,disk=0.5", "optim=0.9,disk=0.5")
_SPLIT: Final = re.compile(r"optim(?:=([^,=]*))?(?:,disk=([^,=]*))?")
#: Steps before updates are delayed.
UNDELAYED_STEPS: Final = 40
MOST_STEPS: Final = 10**9
_SHARE: Final = re.compile(r"[01]|[01]?\.[0-9]{1,15}")
_FRACTION: Final = re.compile(r"(optim|param)(?:=([^@]+)(?:@.*)?|@[^=]*=(.+))")
#: Other names of the tiers, for suggestions.
_HOSTS: Final = ("host", "cpu", "ram", "memory")
_DISKS: Final = ("disk", "nvme", "ssd", "file")
_PARAM_TIERS: Final[dict[str, Tier]] = {"param": "host", "param@disk": "disk"}


@dataclass(frozen=True)
class Offload:
    """A parsed value of the word.

    what        "optim" or "param": parameters never rest further away than their optimizer's state;
                the same with "@disk"; "auto" is not chosen yet, and leaves all on the device
    undelayed   the number of steps before updates are made one step late; None: never
    share       the fraction of the trained parameters, at least, whose states leave the device
    disk_share  the fraction, at least, whose states rest on a disk; at most `share`
    """

    what: str
    undelayed: int | None = None
    share: float = 1.0
    disk_share: float = 0.0

    @property
    def param_tier(self) -> Tier:
        """The tier of parameters between two uses."""
        return _PARAM_TIERS.get(self.what, "device")

    @property
    def optim_tier(self) -> Tier:
        """The tier of the optimizer's state, if that is the same for all units."""
        if self.what == "auto":
            return "device"
        return "disk" if self.disk_share == 1 else "host"

    @property
    def by_unit(self) -> bool:
        """Whether states of units rest on different tiers."""
        return self.share < 1 or 0 < self.disk_share < 1

    def delays(self, step: int) -> bool:
        """Whether the update of step number `step`, from 0, is used one step later."""
        return self.undelayed is not None and step >= self.undelayed

    def tiers(self, numels: Sequence[int]) -> list[Tier]:
        """The tier of the optimizer's state of each unit: of the last ones the furthest.

        `numels` are the units' trained parameters on this rank, in the order of the model.
        """
        on_host, on_disk = (_first(share, numels) for share in (self.share, self.disk_share))
        places = range(len(numels))
        order: tuple[Tier, ...] = ("device", "host", "disk")
        return [order[(k >= on_host) + (k >= on_disk)] for k in places]

    def __str__(self) -> str:
        if self.by_unit:
            share = f"={share_text(self.share)}" * (self.share < 1)
            disk = f",disk={share_text(self.disk_share)}" * (self.disk_share > 0)
            return f"{self.what}{share}{disk}"
        if self.undelayed is None:
            return self.what
        number = "" if self.undelayed == UNDELAYED_STEPS else f"={self.undelayed}"
        return f"{self.what}-delayed{number}"


def parse(text: str) -> Offload:
    """The value of `offload:` as written. Raises InputError for any other."""
    what, equals, number = text.partition("=")
    if text in ("optim", "param", "optim@disk", "param@disk", "auto"):
        return Offload(text, disk_share=float(text.endswith("@disk")))
    if what == "optim-delayed":
        return Offload("optim", _steps(number) if equals else UNDELAYED_STEPS)
    if "@" not in text and (split := _SPLIT.fullmatch(text)):
        return _split(text, *split.groups())
    if text.startswith("disk=") and _is_share(text.removeprefix("disk=")):
        raise bad(
            f"the plan word 'offload:{text}'",
            "the states before the fraction of them that rests on a disk",
            f"offload:optim,{text}",
        )
    _require_no_share(text)
    words = ", ".join(WHAT + BY_FRACTION)
    allowed = f"offload: and the states that rest in host memory or on disk: {words}"
    raise bad(f"the plan word 'offload:{text}'", allowed, f"offload:{_nearest(text)}")


def share_text(share: float) -> str:
    """A fraction as the word has it, without an exponent: "0.5", "0.00001"."""
    return f"{share:.15f}".rstrip("0").removesuffix(".") if share < 1 else "1"


def _first(share: float, numels: Sequence[int]) -> int:
    """The first of the fewest units at the end that have this fraction of all parameters."""
    wanted, found, first = share * sum(numels), 0, len(numels)
    while first and found < wanted:
        first -= 1
        found += numels[first]
    return first


def _split(text: str, leaving: str | None, on_disk: str | None) -> Offload:
    """The value of "optim=LEAVING,disk=ON_DISK", of which either may be left out."""
    disk = f",disk={on_disk}" if on_disk is not None and _is_share(on_disk) else ""
    share = 1.0 if leaving is None else _share(leaving, text, f"optim{disk or '=0.5'}")
    if on_disk is None:
        return Offload("optim", share=share)
    near = "optim,disk=0.5" if leaving is None else f"optim={leaving},disk={leaving}"
    disk_share = _share(on_disk, text, near)
    if disk_share > share:
        raise bad(
            f"the plan word 'offload:{text}'",
            "a disk fraction that does not exceed the first one, which leaves the device",
            f"offload:optim={share_text(disk_share)},disk={share_text(share)}",
        )
    if disk_share == 1:
        return Offload("optim@disk", disk_share=1.0)
    return Offload("optim", share=share, disk_share=disk_share)


def _nearest(text: str) -> str:
    """The value that was probably meant: one with a tier of another name, or a misspelt one."""
    what, at, tier = text.partition("@")
    word = suggest(what, ("optim", "param", "optim-delayed", "auto"), 0.5)
    disk = (at and tier not in _HOSTS) or (not word and text in _DISKS)
    word = word or "optim"
    return f"{word}@disk" if disk and word in ("optim", "param") else word


def _require_no_share(text: str) -> None:
    """Raise InputError for a fraction of parameters, or of states with "@disk"."""
    found = _FRACTION.fullmatch(text)
    if found is None:
        return
    what, (share,) = found[1], filter(None, (found[2], found[3]))
    tier = "@disk" * ("@" in text)
    near = f"optim={share}" + f",disk={share}" * bool(tier)
    near = near if _SHARE.fullmatch(share) else "optim=0.5"
    raise bad(
        f"the plan word 'offload:{text}'",
        "a fraction of the optimizer's states in host memory (offload:optim=0.5), or on a disk "
        "(offload:optim=0.5,disk=0.5); parameters are offloaded as a whole",
        f"offload:param{tier}, or " * (what == "param") + f"offload:{near}",
    )


def _is_share(number: str) -> bool:
    return _SHARE.fullmatch(number) is not None and 0 < float(number) <= 1


def _share(number: str, text: str, instead: str) -> float:
    """The fraction `number` in the word `text`."""
    if _is_share(number):
        return float(number)
    raise bad(
        f"the plan word 'offload:{text}'",
        "a fraction of the parameters, above 0 and at most 1; without the word all stay",
        f"offload:{instead}",
    )


def _steps(text: str) -> int:
    if text.isdecimal() and len(text) < 11 and int(text) <= MOST_STEPS:
        return int(text)
    raise bad(
        f"the plan word 'offload:optim-delayed={text}'",
        f"a number of steps from 0 to {MOST_STEPS}, after which updates are delayed",
        f"offload:optim-delayed={UNDELAYED_STEPS}",
    )
