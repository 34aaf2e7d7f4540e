"""Saves, exports and imports on a disk of a few KB, which fills at any of their writes.

    python -m tests.checkpoint.full_disk FOLDER

FOLDER is on such a disk.  Prints a line for each room that it leaves: the act, and its outcome.
"""

import os
import sys
from pathlib import Path

from shardwise.core.errors import RunError
from tests.checkpoint.test_writers import export_over, import_over, names, run_of, value_in

PAGE_BYTES = 4096  # a tmpfs counts pages
#: More than any act writes.
MOST_PAGES = 24


def save_over(place: Path) -> tuple[Path, object]:
    """A run with a checkpoint of 1, and the save of the same step again, of 2."""
    to = run_of(place / "to", 1.0)
    return to, lambda: run_of(to, 2.0)


def save_beside(place: Path) -> tuple[Path, object]:
    """As `save_over`, of a later step."""
    to = run_of(place / "to", 1.0)
    return to, lambda: run_of(to, 2.0, step=8)


def outcome(place: Path, over: object, pages: int) -> str:
    """What an act comes to with so much room; raises AssertionError for half of a result."""
    to, act = over(place)  # type: ignore[operator]
    before = names(place)
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail
    ballast.write_bytes(bytes(PAGE_BYTES * max(0, free - pages)))
    try:
        act()
    except RunError as error:
        said = str(error)
        assert "\n" not in said and "No space left on device" in said, said
        ballast.unlink()
        assert names(place) == before, (before, names(place))
        assert value_in(to) == 1.0
        return "refused"
    ballast.unlink()
    assert value_in(to) == 2.0
    return "done"


def main(disk: Path) -> None:
    for over in (save_over, save_beside, export_over, import_over):
        found: list[str] = []
        for pages in range(MOST_PAGES):
            place = disk / f"{over.__name__}-{pages}"
            place.mkdir()
            found.append(outcome(place, over, pages))
            os.system(f"rm -r '{place}'")  # noqa: S605
        print(over.__name__, *found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
