"""The plan word of context parallelism: the sequence of each row on several ranks.

    cp4            ring attention
    cp4:ulysses    Ulysses: sequence to heads and back by all-to-all
    cp4:2x2        a ring of 2 of Ulysses groups of 2

The ranks of `cp` are neighbours on the innermost data axis, as those of `ep` are: they hold the
same rows of the batch, and states are sharded and gradients summed over all of them.
"""

import re
from dataclasses import dataclass
from typing import Final

from shardwise.core.errors import bad
from shardwise.core.plan.words import Field, Technique, Word

_WORD = re.compile(r"cp([1-9][0-9]{0,8})(?::(ulysses|([1-9][0-9]*)x([1-9][0-9]*)))?")


@dataclass(frozen=True)
class ContextWord:
    """A parsed word: `ranks` ranks, of which `ulysses` neighbours exchange heads."""

    ranks: int
    ulysses: int = 1

    def __str__(self) -> str:
        if self.ulysses == 1:
            return f"cp{self.ranks}"
        ring = self.ranks // self.ulysses
        return f"cp{self.ranks}:ulysses" if ring == 1 else f"cp{self.ranks}:{ring}x{self.ulysses}"


def parse(word: str) -> ContextWord | None:
    """None for a word of another field. Raises InputError for another form of `cp`."""
    if not re.match(r"cp(?![a-z_])", word):
        return None
    found = _WORD.fullmatch(word)
    if found is None:
        allowed = "cpN, cpN:ulysses, or cpN:RxU with R * U = N"
        raise bad(f"the plan word '{word}'", allowed, "cp2, or cp4:2x2")
    ranks = int(found[1])
    if found[3] is None:
        return ContextWord(ranks, ranks if found[2] else 1)
    ring, ulysses = int(found[3]), int(found[4])
    if ring * ulysses != ranks:
        allowed = f"a ring of R times Ulysses of U ranks, with R * U = {ranks}"
        raise bad(f"the plan word '{word}'", allowed, f"cp{ring * ulysses}:{ring}x{ulysses}")
    return ContextWord(ranks, ulysses)


TECHNIQUE: Final = Technique(
    words=(
        Word(
            "cpN",
            "cp2",
            "context parallelism: each sequence on N ranks, whose keys and values go round a ring",
            values=(
                ("cpN:ulysses", "all-to-all from positions to heads and back, in place of a ring"),
                ("cpN:RxU", "a ring of R groups, each of U ranks with Ulysses"),
            ),
        ),
    ),
    fields=(Field("context", "word cp", parse),),
    problems=lambda _plan, _ranks: (),
    beside_layers=lambda plan: f"'{plan.context}'" if plan.cp > 1 else "",
)
