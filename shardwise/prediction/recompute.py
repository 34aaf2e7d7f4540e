"""What recomputation changes in the record of a pass: the activations that modules keep.

    kept without        every tensor that autograd saves in the forward of the module
    recompute:full      the tensors that the module takes, each once

The other bytes of a step stay: one gather of a unit serves the recomputation and the backward pass.
Of modules that are recomputed selectively the record does not know the products; their bytes are
those without recomputation, and a note says so.
"""

import math
from collections.abc import Mapping

from shardwise.core.model_spec import ELEMENT_BYTES, ModelPass

FULL = "full"


def recomputed(run: ModelPass, kinds: Mapping[str, str]) -> ModelPass:
    """`run`, if the modules in `kinds` are recomputed, each FULL or selectively."""
    full = [name for name, kind in kinds.items() if kind == FULL]
    saved = [(name, size) for name, size in run.saved if not _inside(name, full)]
    counted: set[int] = set()
    for call in run.calls:
        if call.begins and call.module in full:
            taken = set(call.values) - counted
            counted |= taken
            saved.append((call.module, sum(_bytes(run, number) for number in taken)))
    note = run.note
    if len(full) < len(kinds):
        more = "activations are those without selective recomputation, which keeps fewer"
        note = f"{note}; {more}" if note else more
    return run._replace(saved=tuple(saved), note=note)


def _inside(name: str, modules: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _bytes(run: ModelPass, number: int) -> int:
    value = run.values[number]
    return math.prod(value.shape) * ELEMENT_BYTES[value.dtype]
