"""How often ranks are compared: the option `check_every`.

100             replicated weights and optimizer states are compared every 100 steps
"rerun:20"      in every 20th step a microbatch of each data rank is computed by another rank too
"50 rerun:20"   both
"""

import re
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import is_count, short_repr

#: Steps between two comparisons, unless the user says otherwise.
CHECK_EVERY = 100
_TEXT = re.compile(r"(?:(?P<ranks>\d+)\s+)?rerun:(?P<rerun>\d+)")


@dataclass(frozen=True)
class CheckEvery:
    """Steps between two comparisons of ranks, and between two reruns; 0: none."""

    ranks: int = CHECK_EVERY
    rerun: int = 0

    @classmethod
    def parse(cls, value: Any) -> "CheckEvery":
        """Read the option. Raises InputError."""
        if is_count(value):
            return cls(value)
        found = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            allowed = 'a whole number from 0 up, or a text such as "100 rerun:20"'
            raise bad(f"check_every={short_repr(value)}", allowed, "check_every=100")
        numbers = {name: int(n) for name, n in found.groupdict().items() if n}
        return cls(**numbers)


NEVER, USUAL = CheckEvery(0), CheckEvery()
