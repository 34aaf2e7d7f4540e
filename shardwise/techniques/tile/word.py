"""The plan word `tile`: linear layers whose weights are gathered in tiles of their rows.

    tile:4                 the linear layers with at least half the weights of the largest one
    tile:4=head,*.mlp.up   those with these names

(Memory-centric tiling: ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem, bad
from shardwise.core.plan.words import NAMES, Technique, Word, keyed

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

#: The most tiles of a layer.
MOST_TILES: Final = 4096
#: Layers with at least this part of the largest layer's weights are tiled if none is named.
LARGE: Final = 0.5

_WORD = re.compile(rf"([0-9]{{1,9}})(?:=({NAMES.pattern}))?")


@dataclass(frozen=True)
class TileWord:
    """A parsed value of the word: `number` tiles of the layers that match one of `patterns`."""

    number: int
    patterns: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __str__(self) -> str:
        return f"{self.number}={','.join(self.patterns)}" if self.patterns else f"{self.number}"


def parse(text: str) -> TileWord:
    """Raises InputError for what is no value of `tile:`."""
    found = _WORD.fullmatch(text)
    if found and 1 < int(found[1]) <= MOST_TILES:
        return TileWord(int(found[1]), tuple(found[2].split(",")) if found[2] else ())
    raise bad(
        f"the plan word 'tile:{text}'",
        f"tile:N or tile:N=NAMES, N from 2 to {MOST_TILES} and NAMES of linear layers",
        "tile:4 or tile:4=head",
    )


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    if plan.tile is None or not (why := _no_tiles(plan)):
        return
    allowed = "tile with zero3, or with offload:param, which free a tile after its use; with "
    allowed += "accumulate, recompute, clipping and any precision"
    near = replace(plan, row="zero3") if why.startswith(plan.row) else replace(plan, tile=None)
    yield Problem(f"'tile:{plan.tile}' with {why}", allowed, f"'{near}'")


def _no_tiles(plan: "Plan") -> str:
    if plan.pipeline is not None:
        return f"{plan.pipeline}, whose stages gather whole layers"
    if plan.mesh.size_of("tp") > 1:
        return "tensor parallelism, whose ranks already hold a part of each layer"
    if plan.arenas or plan.activations_on_host or plan.recompute_budget_bytes:
        return "arenas, activations in host memory or a budget of activations"
    if not plan.states.moves().reshards:
        return f"{plan.row}, under which the device keeps whole parameters"
    return ""


TECHNIQUE: Final = Technique(
    words=(
        Word(
            "tile:N", "tile:4", "gather large linear layers in N tiles (tile:N=NAMES: these layers)"
        ),
    ),
    fields=(keyed("tile", "choice of tiles", lambda text: str(parse(text))),),
    problems=_problems,
    beside_layers=lambda plan: "" if plan.tile is None else f"'tile:{plan.tile}'",
)
