"""The surface of the program is the one that is checked in."""

from tests import surface


def test_the_surface_is_the_one_that_is_checked_in() -> None:
    """Commands, options, plan words, keys of a configuration, public names: tests/surface.txt."""
    wanted = surface.FILE.read_text(encoding="utf-8").splitlines()
    found = surface.text().splitlines()
    more = [f"+ {line.strip()}" for line in found if line not in wanted]
    less = [f"- {line.strip()}" for line in wanted if line not in found]
    remedy = "if this is meant, run: python -m tests.surface"
    assert found == wanted, "\n".join(["the surface changed", *less, *more, remedy])
