"""Notes on torch's errors: what a tensor plan may lack, and which inputs are not cast."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.tensor_layout import Tensors

#: Torch's messages for shapes that do not fit and indices out of range.
_SHAPES = re.compile(
    r"shape '|sizes? of tensor|shapes cannot be multiplied|normalized_shape|[Ss]izes of tensors"
    r"|exceeds dimension size|index \d+ is out of bounds"
    r"|Expected (input|target) (batch_)?size|Using a target size"
)
#: Torch's messages for operations on several dtypes.
_DTYPES = re.compile(r"same dtype|[Ff]ound dtype|expected scalar type|query's dtype|data type of")
_FEATURES = (
    "If the model runs on one process, its tensor plan may be wrong: a colwise without the rowwise "
    "that takes its result, two styles exchanged, a layer beside them without an entry, no sets= "
    "for a number of heads that the code reads, no colwise_gather_output before code that needs "
    "all features"
)
_POSITIONS = (
    ", no gather for a block that reads the number of positions, no sequence:join for the norm "
    "before code that pools, picks or returns them"
)


@contextmanager
def shapes(tensors: Tensors) -> Iterator[None]:
    """Add the note to shape errors of a model on a tensor axis."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if tensors.axis.size > 1 and _SHAPES.search(str(error)):
            sequence = _POSITIONS if tensors.stream.split else ""
            error.add_note(f"{_FEATURES}{sequence}: docs/tensor-tables.md.")
        raise


@contextmanager
def dtypes(dtype: torch.dtype | None) -> Iterator[None]:
    """Add a note to dtype errors of a model in a precision (precision.py)."""
    try:
        yield
    except RuntimeError as error:
        if dtype is not None and _DTYPES.search(str(error)):
            error.add_note(
                "The batch's own floats are not rounded; layers cast their inputs to "
                f"{str(dtype).removeprefix('torch.')}. Where code outside of layers combines both, "
                "write x.to(self.weight.dtype), or .float() on the output before the loss: "
                "docs/mixed-precision.md."
            )
        raise
