"""The error when memory runs out in a step: what the rank stores, and a plan that would help.

    try:
        engine.step(batch)
    except RuntimeError as error:
        raise explained(error, engine, prediction) if ran_out(error) else error

The error lists the bytes of the rank's tensors at that moment beside the predicted ones, and names
a plan under which the largest of these is smaller (prediction/relief.py).
"""

from collections.abc import Iterator, Sequence

import torch

from shardwise.core.errors import InputError, bad
from shardwise.core.memory_table import ACTIVATIONS, OWNED
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.relief import largest, relieved


def ran_out(error: BaseException) -> bool:
    """Whether an error of torch says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    first = next(iter(str(error).splitlines()), "").lower()
    return isinstance(error, RuntimeError) and "alloc" in first and "memory" in first


def explained(error: BaseException, engine: Engine, found: Prediction) -> InputError:
    """The error to raise in place of `error`: a paragraph and a table.

    `found` is the prediction of the engine's plan for the same model, batch and options.
    """
    plan, rank, now = engine.plan, engine.world.rank, stored(engine)
    said = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    every = found.memory | {ACTIVATIONS: found.activations}
    most = largest(every)
    near = relieved(plan, most)
    problem = bad(
        f"a step of the plan '{plan}' for which rank {rank} has too little memory on "
        f"{engine.world.device} ({said}); most of what it stores is {most}",
        "a plan, a model or a batch for which there is room",
        (f"--plan '{near}', or " if near else "") + "a smaller model or batch",
    )
    names = (*OWNED, ACTIVATIONS)
    held = [(name, now.get(name), every.get(name)) for name in names]
    table = _table((f"rank {rank} stores, bytes", "now", "predicted"), held)
    return InputError("\n".join([str(problem), "", *table]))


def stored(engine: Engine) -> dict[str, int]:
    """What this rank stores now, in the middle of a step; activations only if they are known."""
    found, device = memory.in_step(engine), engine.world.device
    if device.type == "cuda":
        found[ACTIVATIONS] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    return found


def _table(
    head: tuple[str, str, str], rows: Sequence[tuple[str, int | None, int | None]]
) -> Iterator[str]:
    """Lines of three columns, numbers to the right."""
    shown = [head] + [(name, *("-" if n is None else f"{n:,}" for n in of)) for name, *of in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(3)]
    for name, *numbers in shown:
        right = (n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *right])
