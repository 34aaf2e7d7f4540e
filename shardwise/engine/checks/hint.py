"""Errors in a step: what a tensor plan may lack, which inputs are not cast, the step's number.

Under data parallelism a compiled block sees full parameters, and hooks run between two graphs
(core/tools/structure.py).  Tensor parallelism, context parallelism and pipelines intercept single
operations of a forward pass, which a compiled graph no longer has: there the model runs without
torch.compile.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import InputError, NonFiniteError, bad, one_line
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.structure import uncompiled
from shardwise.engine.precision import HALF

#: Torch's messages for shapes that do not fit and indices out of range.
_SHAPES = re.compile(
    r"shape '|sizes? of tensor|shapes cannot be multiplied|normalized_shape|[Ss]izes of tensors"
    r"|exceeds dimension size|index \d+ is out of bounds"
    r"|Expected (input|target) (batch_)?size|Using a target size|should contain \d+ elements"
)
#: Torch's messages for operations on several dtypes.
_DTYPES = re.compile(r"same dtype|[Ff]ound dtype|expected scalar type|query's dtype|data type of")
#: What is allowed under `tp`, and what to write instead; then the same under `cp`.
_TABLE = (
    "a tensor plan without these faults: a colwise without the rowwise that takes its result, two "
    "styles exchanged, a layer beside them without an entry"
)
_FEATURES = (
    "sets= for a number of heads that the code reads, colwise_gather_output before code that needs "
    "all features"
)
_POSITIONS = (
    ", a gather for a block that reads the number of positions, sequence:join for the norm before "
    "code that pools, picks or returns them"
)
_BATCH = (
    "a batch whose dim 1 has the positions, of which each rank has some, and code for any number "
    "of them"
)
_CUT = (
    "a plan without cp where dim 1 has features, or the model needs a fixed number of positions; "
    "in place of a mask of padding [rows, T], a mask [rows, 1, T, T]: docs/explanation/context.md"
)


@contextmanager
def shapes(plan: Plan) -> Iterator[None]:
    """Add the note to shape errors of a model on a tensor axis, and to errors under `cp`."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        for allowed, instead in _advice(plan, error):
            error.add_note(f"If the model runs on one process, it needs {allowed}: {instead}.")
        raise


@contextmanager
def sharded(plan: Plan, alone: Callable[[], object]) -> Iterator[None]:
    """Refuse a sharded model with an error of shapes if the plain one runs, `alone`."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        advice = next(_advice(plan, error), None)
        if advice is None or not _SHAPES.search(str(error)):
            raise
        with suppress(InputError):
            alone()
        given = f"a model that runs on one process and not under '{plan}': {one_line(str(error))}"
        raise bad(given, *advice) from error


def _advice(plan: Plan, error: Exception) -> Iterator[tuple[str, str]]:
    if plan.context is not None and plan.cp > 1 and not isinstance(error, InputError):
        yield _BATCH, _CUT
    if plan.mesh.size_of(TENSOR) > 1 and _SHAPES.search(str(error)):
        yield _TABLE, f"{_FEATURES}{_POSITIONS if plan.sp else ''}: docs/how-to/tables.md"


@contextmanager
def step(number: int) -> Iterator[None]:
    """Add the step's number to the error of a router that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"Step {number}: {error}") from None


@contextmanager
def dtypes(dtype: torch.dtype | None) -> Iterator[None]:
    """Refuse a model in 16 bits with an error of dtypes (precision.py)."""
    try:
        yield
    except RuntimeError as error:
        if dtype not in HALF or isinstance(error, InputError) or not _DTYPES.search(str(error)):
            raise
        name = str(dtype).removeprefix("torch.")
        raise bad(
            f"code that combines {name} and other floats: {one_line(str(error))}",
            f"layers, which cast their inputs to {name}; the batch's own floats and buffers, such "
            "as tables of positions, are not rounded",
            "x.to(self.weight.dtype) or query.to(value.dtype) outside of layers, and .float() on "
            "the output before the loss: docs/explanation/states.md",
        ) from error


# --- models without torch.compile -----------------------------------------------------------------


def followed(plan: Plan) -> bool:
    return plan.pipeline is not None or plan.mesh.size_of("tp") > 1 or plan.cp > 1


def without_compiler(model: nn.Module, where: str, rank: int = 0) -> nn.Module:
    """The model, in which torch.compile is undone in place; rank 0 prints a line if it was there.
    Compiled parts become what they were made from; graphs that exist are not used any more.
    """
    if "torch._dynamo" not in sys.modules:
        return model
    inner, found = uncompiled(model), uncompiled(model) is not model
    for module in list(inner.modules()):
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl, found = None, True
        for key, part in module._modules.items():
            if part is not None and uncompiled(part) is not part:
                module._modules[key], found = uncompiled(part), True
    if found and not rank:
        print(
            f"shardwise: the {type(inner).__name__} runs without torch.compile under {where}, "
            "which follows single operations.",
            file=sys.stderr,
        )
    return inner


def as_followed(plan: Plan, model: nn.Module, loss: Any, rank: int) -> tuple[nn.Module, Any]:
    """The model and the loss, without torch.compile where the plan follows operations."""
    if not followed(plan):
        return model, loss
    plain = getattr(loss, "_torchdynamo_orig_callable", loss)
    return without_compiler(model, f"'{plan}'", rank), plain
