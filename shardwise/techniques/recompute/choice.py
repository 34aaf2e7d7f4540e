"""The modules that the plan word `recompute:WHAT` selects in a model.

full, selective      every block
partitioned          every block
partitioned-host     every block: partitioned
every2               blocks 0, 2, 4, ...: full
NAME,NAME            the outermost modules whose names these patterns match: full
8GiB                 every block: full until dry runs have chosen (observe/foreseen.py)
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch

from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import suggest
from shardwise.techniques.recompute.checkpointed import FULL, PARTITIONED, SELECTIVE
from shardwise.techniques.recompute.word import PARTITIONED_WORDS, recompute_budget, recompute_every


def chosen(model: nn.Module, what: str | None, blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """The names of the modules that `recompute:what` recomputes, with their kinds."""
    if what is None:
        return {}
    every = recompute_every(what)
    parts = what in PARTITIONED_WORDS
    if what not in (FULL, SELECTIVE) and not parts and not every and not recompute_budget(what):
        return dict.fromkeys(_named(model, what.split(","), what), FULL)
    if not blocks:
        raise bad(
            f"recompute:{what} for a {type(model).__name__}, in which no class of modules repeats",
            "a model with a list of blocks, or the names of the modules to recompute",
            f"recompute:{','.join(_callable_names(model)[:1]) or 'NAME'}",
        )
    kind = PARTITIONED if parts else SELECTIVE if what == SELECTIVE else FULL
    return dict.fromkeys(list(blocks)[:: every or 1], kind)


def on_host(
    model: nn.Module, plan: Plan, blocks: Mapping[str, nn.Module], kinds: Mapping[str, str]
) -> tuple[str, ...]:
    """The blocks whose kept activations rest in host memory; `kinds` are the recomputed modules."""
    word = f"activations:{plan.activations}"
    if not blocks:
        given = f"{word} for a {type(model).__name__}, in which no class of modules repeats"
        raise bad(given, "a model with a list of blocks", "the plan without this word")
    for name in kinds:
        if inside := first_inside(name, blocks):
            given = f"{word} and the recomputation of {name}, in which {inside} is a block"
            allowed = "recomputation of blocks, or of modules inside of them"
            raise bad(given, allowed, f"recompute:{inside}")
    return tuple(blocks)


def first_inside(name: str, names: Iterable[str]) -> str | None:
    return next((inside for inside in names if inside.startswith(f"{name}.")), None)


def _named(model: nn.Module, patterns: list[str], what: str) -> Iterator[str]:
    names = _callable_names(model)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            near = suggest(pattern, [FULL, SELECTIVE, *PARTITIONED_WORDS, *names])
            raise bad(
                f"recompute:{what} for a {type(model).__name__}, where {pattern} matches no module",
                f"full, selective, everyN, or names of modules: {', '.join(names[:6])}, ...",
                f"recompute:{near or FULL}",
            )
    found: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(fnmatch(name, pattern) for pattern in patterns):
            found.append(name)
            yield name


def _callable_names(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward
    ]
