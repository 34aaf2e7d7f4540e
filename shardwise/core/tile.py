"""The plan word `tile`: linear layers whose weights are gathered in tiles of their rows.

    tile:4                 the linear layers with at least half the weights of the largest one
    tile:4=head,*.mlp.up   those with these names

(Memory-centric tiling: ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.)
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from shardwise.core.errors import bad
from shardwise.core.uneven import Cut

#: The most tiles of a layer.
MOST_TILES: Final = 4096
#: Layers with at least this part of the largest layer's weights are tiled if none is named.
LARGE: Final = 0.5

_WORD = re.compile(r"([0-9]{1,9})(?:=([\w.*?!\[\]-]+(?:,[\w.*?!\[\]-]+)*))?")


@dataclass(frozen=True)
class Tile:
    """A parsed value of the word: `number` tiles of the layers that match one of `patterns`."""

    number: int
    patterns: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Whether a pattern matches the layer `name`."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of `names`."""
        known = list(names)
        return [p for p in self.patterns if not any(fnmatchcase(name, p) for name in known)]

    def __str__(self) -> str:
        return f"{self.number}={','.join(self.patterns)}" if self.patterns else f"{self.number}"


def parse(text: str) -> Tile:
    """The value of `tile:` as written. Raises InputError for any other."""
    found = _WORD.fullmatch(text)
    if found and 1 < int(found[1]) <= MOST_TILES:
        return Tile(int(found[1]), tuple(found[2].split(",")) if found[2] else ())
    raise bad(
        f"the plan word 'tile:{text}'",
        f"tile: and a whole number of tiles from 2 to {MOST_TILES}, then perhaps = and patterns of "
        "the names of linear layers",
        "tile:4 or tile:4=head",
    )


class TiledParam(NamedTuple):
    """The rows of a tile: those of number `place` in `cut`, of the parameter `name`."""

    name: str
    place: int
    cut: Cut
