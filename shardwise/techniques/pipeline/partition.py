"""Partition of a model into pipeline stages, balanced by parameters or measured time.

    embed  blocks.0  blocks.1 | blocks.2  blocks.3 | blocks.4  blocks.5  norm  head      pp3
                              starts = ("blocks.2", "blocks.4")

Stages are contiguous, and begin at elements of the model's lists of repeated blocks; other layers
go with their neighbours. With more stages than blocks, a stage may begin at any layer. The heaviest
stage is as light as possible (core/layouts/uneven.py), or a plan counts the blocks of each stage.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, Final

import torch
from torch import nn

from shardwise.comm.move import broadcast
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import balanced
from shardwise.core.tools.arguments import integer
from shardwise.engine.checks import validate
from shardwise.techniques.pipeline.call_order import calls_of
from shardwise.techniques.pipeline.trace.placeholders import Calls, StageLayer, defined, layers

#: A list with less than this fraction of the heaviest list's parameters is not split.
LEAST: Final = 1 / 8
NAMED: Final = 6  # modules named in an error


def starts(
    model: nn.Module, stages: int, names: Sequence[str] | None = None, calls: Calls | None = None
) -> tuple[str, ...]:
    """The names of the modules that begin stages 1 to `stages` - 1. Without `names`, parameters
    balance the stages; of equal partitions, every rank finds the earliest. `calls`: call_order.py.
    """
    if names is not None:
        if len(names) != stages - 1:
            raise bad(
                f"{len(names)} starts ({', '.join(names) or 'none'}) for {stages} "
                f"stage{'s' * (stages > 1)}",
                f"{stages - 1}: the first module of each stage after the first",
                "stages=None, which balances the stages by parameters",
            )
        layers(model, names, calls)
        return tuple(names)
    cuts = candidates(model, stages, calls)
    weights = [0] * len(cuts)
    seen: set[tuple[int, int]] = set()
    for name, layer in layers(model, cuts[1:], calls).items():
        for stage in layer.stages:
            for p in model.get_submodule(name).parameters():
                weights[stage] += p.numel() * ((stage, id(p)) not in seen)
                seen.add((stage, id(p)))
    return tuple(cuts[i] for i in balanced(weights, stages))


def starts_of_counts(
    model: nn.Module, counts: Sequence[int], calls: Calls | None = None
) -> tuple[str, ...]:
    """Like `starts`, with so many of the blocks in each stage."""
    cuts, word = candidates(model, len(counts), calls), f"stages:{','.join(map(str, counts))}"
    if sum(counts) != len(cuts):
        raise bad(
            f"{word}, whose sum is {sum(counts)}, for a {type(model).__name__} that {len(counts)} "
            f"stages divide into {len(cuts)} pieces ({', '.join(cuts[:NAMED])})",
            f"numbers whose sum is {len(cuts)}",
            "the plan without this word, which balances the stages by parameters",
        )
    return tuple(cuts[i] for i in accumulate(counts[:-1]))


_EXAMPLE = "balance_by_time(model, lambda model: model(x), 4)"


def balance_by_time(
    model: nn.Module,
    call: Callable[[nn.Module], Any],
    stages: int,
    repeats: int = 3,
    world: World | None = None,
) -> tuple[str, ...]:
    """Like `starts`, but balanced by the measured forward time of layers, best of `repeats` runs.

    `call(model)` runs the whole model on this device, without gradients; the time of the backward
    pass is assumed to be proportional. Pass the result to `parallelize(..., stages=...)`. Times
    differ between ranks: with `world`, which all ranks must pass, rank 0's times decide.

    Raises:
        InputError: fewer layers than stages, or a model on the meta device.
    """
    validate.model(model, "sw.balance_by_time")
    validate.function("call", call, ("model",), _EXAMPLE)
    integer("stages", stages, 1, 2)
    integer("repeats", repeats, 1, 3)
    if any(p.is_meta for p in model.parameters()):
        raise bad(
            f"a {type(model).__name__} on the meta device, whose layers take no time",
            "a model on the device that it will run on",
            "starts(model, stages), which balances by parameters",
        )
    calls = calls_of(model, lambda model, _: call(model))
    cuts = candidates(model, stages, calls)
    found = layers(model, cuts[1:], calls)
    runs = [_timed(model, found, len(cuts), call) for _ in range(repeats + 1)]
    weights = [min(times) for times in zip(*runs[1:], strict=True)]
    if world is not None:
        local = torch.tensor(weights, dtype=torch.float64, device=world.device)
        weights = broadcast(local, world.everyone).tolist()
    return tuple(cuts[i] for i in balanced(weights, stages))


def _timed(
    model: nn.Module, found: Mapping[str, StageLayer], pieces: int, call: Callable[[nn.Module], Any]
) -> list[float]:
    taken = [0.0] * pieces
    began: dict[str, float] = {}

    def begin(name: str, module: nn.Module, _: Any) -> None:
        began[name] = _now(module)

    def end(name: str, module: nn.Module, *_: Any) -> None:
        taken[found[name].stages[0]] += _now(module) - began[name]

    handles = []
    for name in found:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(partial(end, name)))
    try:
        with torch.no_grad():
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    return taken


def _now(module: nn.Module) -> float:
    if any(p.is_cuda for p in module.parameters(recurse=True)):
        torch.cuda.synchronize()
    return time.perf_counter()


def candidates(model: nn.Module, stages: int, calls: Calls | None = None) -> tuple[str, ...]:
    """The modules at which one of so many stages may begin, in order."""
    places = calls or defined(model)
    blocks = _in_order(_repeated(model), places)
    if len(blocks) >= stages:
        return tuple(blocks)
    every = layers(model, blocks[1:], calls)
    if len(every) < stages:  # layers in lists may each have a class of their own
        found = _in_order(chain(*_lists(model, "", sum)), places)
        every = layers(model, found[1:], calls)
    every = _in_order(every, places)
    if len(every) < stages:
        raise bad(
            f"{stages} stages for a {type(model).__name__} of {len(every)} layers",
            f"at most as many stages as layers: {', '.join(every[:NAMED]) or 'it has none'}",
            f"pp{max(1, len(every))}, or fewer chunks of the schedule",
        )
    return tuple(every)


def _in_order(names: Iterable[str], places: Calls) -> list[str]:
    """By the first call; one that is never called has the place of another, and begins nothing."""
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(places[name][0], name)
    return [first[place] for place in sorted(first)]


def _repeated(model: nn.Module) -> list[str]:
    """The elements of the outermost lists in which one class occurs several times."""
    lists = list(_lists(model, ""))
    weights = [sum(p.numel() for m in found.values() for p in m.parameters()) for found in lists]
    heavy = LEAST * max(weights, default=0)
    pairs = zip(lists, weights, strict=True)
    return [name for found, weight in pairs if weight >= heavy for name in found]


def _lists(
    module: nn.Module, name: str, most: Callable[[Iterable[int]], int] = max
) -> Iterator[dict[str, nn.Module]]:
    """Yield each list with several layers of one class (`sum`: of any), from names to modules."""
    children = {f"{name}.{key}" if name else key: m for key, m in module.named_children()}
    layers = {key: m for key, m in children.items() if next(m.parameters(), None) is not None}
    kinds = Counter(type(m) for m in layers.values() if type(m).forward is not nn.Module.forward)
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    if is_list and most([0, *kinds.values()]) > 1:
        yield layers
    else:
        for key, child in layers.items():
            yield from _lists(child, key, most)
