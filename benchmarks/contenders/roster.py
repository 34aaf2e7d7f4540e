"""The list of all contenders, the suites, and the selection of contenders by name."""

from typing import Final

from benchmarks.contenders import (
    deepspeed_peers,
    expert_peers,
    ours,
    torch_peers,
    torch_pipeline,
    torch_tensor,
)
from benchmarks.contenders.contender import Contender, Loop
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest

_DATA: Final = (*torch_peers.PEERS, *deepspeed_peers.PEERS, *ours.DATA)
_LOOPS: Final = (
    torch_peers.DDP,
    *(each for each in torch_peers.PEERS if each.name == "FSDP2"),
    torch_peers.ACCELERATE,
    *ours.LOOPS,
)
_TENSOR: Final = (*torch_tensor.PEERS, torch_peers.DDP, *ours.TENSOR)
_CONTEXT: Final = (*torch_tensor.CONTEXT, *ours.CONTEXT)
_MEMORY: Final = (
    *(each for each in ours.DATA if each.name == "zero3"),
    *ours.MEMORY,
    *(each for each in torch_peers.PEERS if each.name in ("torch DDP", "FSDP2")),
    *torch_peers.MEMORY,
)
_OFFLOAD: Final = (
    *(each for each in ours.DATA if each.name in ("zero2", "zero3")),
    *ours.OFFLOAD,
    *ours.TILED,
    torch_peers.OFFLOAD,
    *deepspeed_peers.OFFLOAD,
)
_LAYERS: Final = (
    torch_peers.DDP,
    *(each for each in ours.DATA if each.name != "zero2"),
    *(each for each in ours.TENSOR if each.name == "tp"),
    *ours.LAYERS,
)
_PIPELINE: Final = tuple(
    contender
    for pair in zip(torch_pipeline.PEERS, ours.PIPELINE, strict=True)
    for contender in pair
)

ROSTER: Final[dict[str, Contender[Loop]]] = {
    each.name: each
    for suite in (
        *(_DATA, _LOOPS, _TENSOR, _CONTEXT, _PIPELINE, _MEMORY, _OFFLOAD, _LAYERS),
        expert_peers.PEERS,
    )
    for each in suite
}

#: The contenders of each suite, in the order of its table. Ratios refer to the first contender,
#: in `pipeline` to torch's same schedule.
SUITES: Final[dict[str, tuple[str, ...]]] = {
    "data": tuple(each.name for each in _DATA),
    "loops": tuple(each.name for each in _LOOPS),
    "tensor": tuple(each.name for each in _TENSOR),
    "context": tuple(each.name for each in _CONTEXT),
    "pipeline": tuple(each.name for each in _PIPELINE),
    "memory": tuple(each.name for each in _MEMORY),
    "offload": tuple(each.name for each in _OFFLOAD),
    "layers": tuple(each.name for each in _LAYERS),
    "experts": tuple(each.name for each in expert_peers.PEERS),
}


def reference(suite: str, name: str) -> str:
    """The contender that the ratio of this one refers to."""
    return ROSTER[name].against or SUITES[suite][0]


def references(suite: str, name: str) -> list[str]:
    """`name`, its reference, the reference of that, and so on."""
    found = [name]
    while (further := reference(suite, found[-1])) != found[-1]:
        found.append(further)
    return found


def choose(suite: str, words: list[str]) -> tuple[str, ...]:
    """The contenders of the suite named by `words` (none: all), together with their references.

    Case, spaces and dashes are ignored, and a prefix selects all names that begin with it:
    "deepspeed", "fsdp2-without-reshard". Raises InputError for a word that matches none.
    """
    names = list(SUITES[suite])
    if not words:
        return tuple(names)
    chosen: set[str] = set()
    for word in words:
        fits = _fits(word, names)
        if not fits:
            instead = f'python -m benchmarks {suite} "{suggest(word, names)}"'
            raise bad(f'the contender "{word}"', ", ".join(names), instead)
        chosen.update(*(references(suite, name) for name in fits))
    return tuple(name for name in names if name in chosen)


def _fits(word: str, names: list[str]) -> list[str]:
    plain = _plain(word)
    exact = [name for name in names if _plain(name) == plain]
    return exact or [name for name in names if plain and _plain(name).startswith(plain)]


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())
