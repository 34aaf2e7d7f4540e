"""Values of plan words: whole numbers, sizes in bytes, and patterns of names."""

import re
from typing import Final

from shardwise.core.errors import bad

#: Units of a SIZE, largest first.
UNITS: Final[dict[str, int]] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
#: The largest number in a word, and the largest SIZE in bytes.
MOST: Final = 10**9
MOST_BYTES: Final = 2**40
#: Patterns of names with commas between them.
NAMES: Final = re.compile(r"[\w.*?!\[\]-]+(,[\w.*?!\[\]-]+)*")

_SIZE = re.compile(r"([0-9]+)(GiB|MiB|KiB|B)")
_LIKE_A_SIZE = re.compile(r"[0-9]+[kmgKMG]?i?[bB]?")


def whole(digits: str, most: int = MOST) -> int:
    """Parse a number from 1 to `most`; 0 if `digits` is not one."""
    number = int(digits) if re.fullmatch("[0-9]{1,99}", digits) else 0
    return number if number <= most else 0


def read_count(key: str, value: str) -> int:
    """The number of the word `key:value`. Raises InputError for anything else."""
    if number := whole(value):
        return number
    allowed = f"{key}: and a whole number from 1 to {MOST}"
    raise bad(f"the plan word '{key}:{value}'", allowed, f"{key}:4")


def read_size(key: str, value: str) -> int:
    """The bytes of the word `key:SIZE`. Raises InputError for anything else."""
    if (found := _SIZE.fullmatch(value)) and whole(found[1], MOST_BYTES // UNITS[found[2]]):
        return int(found[1]) * UNITS[found[2]]
    allowed = f"{key}: and a whole number from 1 up with its unit, B, KiB, MiB or GiB, "
    allowed += f"{size_text(MOST_BYTES)} at most"
    raise bad(f"the plan word '{key}:{value}'", allowed, f"{key}:25MiB")


def like_a_size(value: str) -> bool:
    """Whether a value is a SIZE, perhaps with a wrong unit or none."""
    return _LIKE_A_SIZE.fullmatch(value) is not None


def size_bytes(value: str) -> int:
    """The bytes of a SIZE; 0 for any other text."""
    found = _SIZE.fullmatch(value)
    return int(found[1]) * UNITS[found[2]] if found else 0


def size_text(nbytes: int) -> str:
    """A number of bytes as a SIZE, in the largest unit that divides it."""
    unit = next(unit for unit, of in UNITS.items() if nbytes % of == 0)
    return f"{nbytes // UNITS[unit]}{unit}"
