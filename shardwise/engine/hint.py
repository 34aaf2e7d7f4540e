"""this file is a word beside torch's errors of shapes: what the table of a cut model may lack."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.engine.tensor_layout import Tensors

#: How torch says that shapes do not fit, or that a place is not there.
_SHAPES = re.compile(
    r"shape '|sizes? of tensor|shapes cannot be multiplied|normalized_shape|[Ss]izes of tensors"
    r"|exceeds dimension size|index \d+ is out of bounds"
    r"|Expected (input|target) (batch_)?size|Using a target size"
)
_FEATURES = (
    "If it runs on one process, the table may lack sets= for a number of heads that the code "
    "reads, colwise_gather_output before code that needs all features"
)
_POSITIONS = (
    ", gather for a block that reads the number of positions, sequence:join for the norm before "
    "code that pools, picks or returns them"
)


@contextmanager
def shapes(tensors: Tensors) -> Iterator[None]:
    """Add a note to an error of shapes where a model is on a tensor axis; to no other."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if tensors.axis.size > 1 and _SHAPES.search(str(error)):
            sequence = _POSITIONS if tensors.stream.split else ""
            error.add_note(f"{_FEATURES}{sequence}: docs/tensor-tables.md.")
        raise
