"""This file is the list of all contenders, in the order of the table, and how one is named."""

from typing import Final

from shardwise.bench import deepspeed_peers, fairscale_peers, ours, torch_peers
from shardwise.bench.contender import Contender
from shardwise.core.errors import bad
from shardwise.models.trainable import nearest

REFERENCE: Final = "torch DDP"  # every ratio is to this one

ROSTER: Final[dict[str, Contender]] = {
    contender.name: contender
    for contender in (
        *torch_peers.PEERS,
        *deepspeed_peers.PEERS,
        *fairscale_peers.PEERS,
        *ours.OURS,
    )
}


def choose(words: list[str]) -> tuple[str, ...]:
    """The contenders that `words` name, all of them for none; the reference always runs.

    Capitals, spaces and dashes do not count, and the beginning of a name stands for all that begin
    so: "deepspeed", "fsdp2-without-reshard". Raises InputError for a word that fits none.
    """
    names = list(ROSTER)
    if not words:
        return tuple(names)
    chosen = {REFERENCE}
    for word in words:
        fits = _fits(word, names)
        if not fits:
            close = nearest(word, names, 1)
            raise bad(
                f'the contender "{word}"', ", ".join(names), f'shardwise bench data "{close[0]}"'
            )
        chosen.update(fits)
    return tuple(name for name in names if name in chosen)


def _fits(word: str, names: list[str]) -> list[str]:
    plain = _plain(word)
    exact = [name for name in names if _plain(name) == plain]
    return exact or [name for name in names if plain and _plain(name).startswith(plain)]


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())
