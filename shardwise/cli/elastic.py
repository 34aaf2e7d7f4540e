"""Elastic runs on this machine: `shardwise train --nproc MIN:MAX`.

    a rank is lost          the run goes on from its last checkpoint with the ranks that are left
    a checkpoint is saved   the run stops after that step, and goes on with MAX ranks again
    a rank is lost again    it waits for 2, then 4, ... checkpoints before it grows

The global batch, the order of the data and the learning rate depend on the step alone, so the run
computes what it would have computed undisturbed. (Across hosts, torchrun's --nnodes MIN:MAX does
the same: its agents restart the ranks, and --resume auto continues the run.)
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.folder import CHECKPOINTS, all_in, step_of
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import parse_count
from shardwise.train.config import Config

if TYPE_CHECKING:
    from shardwise.comm.start.launch import Ended

#: Losses in a row without a checkpoint between them, after which the run ends.
TRIES = 3


@dataclass(frozen=True)
class Nproc:
    """`--nproc N`, or `--nproc MIN:MAX` of an elastic run."""

    least: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change."""
        return self.least != self.most


def nproc_of(text: str) -> Nproc:
    """Raises InputError unless the text is N or MIN:MAX, whole numbers with MIN below MAX."""
    low, colon, high = text.partition(":")
    found = Nproc(parse_count(low), parse_count(high or low))
    if min(found.least, found.most) < 0 or (colon and not high):
        raise bad(f"--nproc '{text}'", "a whole number, or MIN:MAX", "--nproc 2, or --nproc 2:4")
    if colon and not 0 < found.least < found.most:
        raise bad(f"--nproc {text}", "MIN from 1 up, and MAX above it", f"--nproc {high}")
    return found


def usable_sizes(nproc: Nproc, require: Callable[[int], object], plan: str) -> list[int]:
    """The numbers of ranks from MIN to MAX on which the plan runs, MAX among them.

    `require` raises InputError for a number on which it does not run.

    Raises:
        InputError: the plan runs on MAX ranks alone, so it cannot shrink; or not even on those.
    """
    require(nproc.most)
    sizes = [ranks for ranks in range(nproc.least, nproc.most) if _runs(ranks, require)]
    if not sizes:
        data = re.search(r"\bdp\d+", plan)
        other = f"the plan without {data[0]}" if data else "a lower MIN" if nproc.least > 1 else ""
        raise bad(
            f"--nproc {nproc.least}:{nproc.most} with the plan '{plan}', which runs on "
            f"{nproc.most} ranks alone",
            "a plan without a size of its data axis, which is completed for each number of ranks, "
            "and a MIN that its other axes divide",
            f"{other}{', or ' * bool(other)}--nproc {nproc.most}",
        )
    return [*sizes, nproc.most]


def _runs(ranks: int, require: Callable[[int], object]) -> bool:
    try:
        require(ranks)
    except InputError:
        return False
    return True


class Growth:
    """When a run that has shrunk may stop to grow again: after `wait` more checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wait = folder, 1
        self.seen = self.newest()

    def newest(self) -> int:
        """The step of the newest checkpoint; -1 if there is none."""
        return max(map(step_of, all_in(self.folder)), default=-1)

    def due(self) -> bool:
        """Whether enough checkpoints have been saved; called several times a second."""
        if (newest := self.newest()) > self.seen:
            self.seen, self.wait = newest, self.wait - 1
        return self.wait <= 0


def train_elastic(
    config: Config,
    sizes: list[int],
    start: "Callable[[int, bool, Callable[[], bool] | None], Ended]",
    *,
    overwrite: bool = False,
) -> int:
    """Run with as many of `sizes` ranks as there are, until the run ends; returns the exit code.

    `start(ranks, again, stop_when)` runs it until it ends, is stopped, or loses a rank; `again`: it
    continues from its checkpoint. A run that is to `overwrite` another does so until it has one.
    """
    growth = Growth(config.folder / CHECKPOINTS)
    ranks, again, wait, tries = sizes[-1], False, 0, 0
    while True:
        before = growth.newest()
        growth.seen, growth.wait = before, wait
        whole = ranks == sizes[-1]
        ended = start(ranks, again, None if whole else growth.due)
        moved = growth.newest() not in (-1, before)
        again = again or moved or not overwrite
        tries = 0 if moved else tries + 1
        if ended.stopped:
            ranks = sizes[-1]
            _say(f"the run has a new checkpoint, and goes on with {ranks} ranks")
        elif not ended.lost or tries >= TRIES:
            return ended.code
        else:
            left = [size for size in sizes if size <= ranks - ended.lost]
            if not left and len(sizes) == 1:
                return ended.code
            if not left:
                _say(f"fewer than {sizes[0]} ranks are left: the run ends")
                return ended.code
            wait = 1 if whole and moved else max(1, 2 * wait)
            ranks = left[-1]
            _say(f"the run goes on with {ranks} of {sizes[-1]} ranks from its last checkpoint")


def _say(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)
