"""Memory over ten steps: what is alive after them, found by its storages, is accounted for.

An engine of the plan is built, makes ten steps and evaluates once, all of it followed by
engine/live.py.  After the third step and after the tenth

    theory    each category has the bytes of its formula, and nothing is alive that is in none
    read      the sizes of the storages that are alive

A model may keep activations itself, as attributes of its modules (`self.seen = x`).  What the
model of the one process keeps under the same names is its own, and is taken away before the
reading.
"""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from shardwise.comm.hang_detector import HANG_DETECTOR
from shardwise.engine.engine import Engine
from shardwise.engine.live import Live, Stray

READ_AFTER: Final = (3, 10)
_LOOK_S: Final = 10.0  # a look of a look-out, on a busy machine


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are, as read and by theory; and the largest strays, in words."""

    read: dict[str, int]
    theory: dict[str, int]
    strays: str = ""


#: Of a model's tensors that are attributes of modules, by the module's name and the attribute's.
Attributes = dict[tuple[str, str], Tensor]


def attributes(model: nn.Module) -> Attributes:
    """Tensors that are attributes of modules, and neither parameters nor buffers."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def over_steps(
    engine: Engine, live: Live, batch: Callable[[int], Any], own: Collection[tuple[str, str]] = ()
) -> Memory:
    """Train `engine`, which was built under `live`, on `batch(step)`; called by all ranks.

    `own` are the attributes that the same model has in one process.  A category is shown where it
    is not what theory says.
    """
    built = attributes(engine.model)
    read: dict[str, int] = {}
    theory: dict[str, int] = {}
    strays = ""
    for step in range(1, READ_AFTER[-1] + 1):
        share = batch(step)
        with live:
            engine.step(share)
            if step == 1:
                engine.evaluate(share)
        if step in READ_AFTER:
            engine.wait()
            engine.world.barrier()  # ranks in threads read each other's tensors until here
            _restore(engine.model, built, own)
            left = _left(engine, live)
            found, expected = engine.memory(), engine.predicted_memory()
            off = {name: found[name] for name in found if found[name] != expected.get(name)}
            when = f"after step {step}"
            read |= {f"{name}, {when}": n for name, n in off.items()}
            theory |= {f"{name}, {when}": expected.get(name, 0) for name in off}
            read[f"in no category, {when}"] = sum(stray.stored_bytes for stray in left)
            theory[f"in no category, {when}"] = 0
            strays = strays or _words(left, when)
    return Memory(read, theory, strays)


def _restore(model: nn.Module, built: Attributes, own: Collection[tuple[str, str]]) -> None:
    """Of the attributes in `own`: those that the model was built with, and no others."""
    for name, key in attributes(model).keys() & set(own):
        vars(model.get_submodule(name)).pop(key)
        if (name, key) in built:
            setattr(model.get_submodule(name), key, built[name, key])


def _left(engine: Engine, live: Live) -> list[Stray]:
    """What is alive in no category, once nobody looks at the calls of the step any more.

    While a rank's look-out (comm/hang_detector.py) looks at the calls that the program is in, it
    keeps the values in them alive, also if they return meanwhile.  A rank in a thread has none.
    """
    ends = time.monotonic() + _LOOK_S
    while True:
        gc.collect()  # what only a cycle keeps is not kept
        left = live.unaccounted(engine)
        watched = any(thread.name == HANG_DETECTOR for thread in threading.enumerate())
        if not left or not watched or time.monotonic() > ends:
            return left
        time.sleep(0.1)


def _words(left: list[Stray], when: str) -> str:
    if not left:
        return ""
    kinds = Counter(left).most_common()
    kinds.sort(key=lambda kind: -kind[0].stored_bytes * kind[1])
    named = [f"{n} of {one.stored_bytes:,} bytes made by {one.made_by}" for one, n in kinds[:3]]
    return f"alive {when} and in no category: {', '.join(named)}"
