"""The plan words of tensor and sequence parallelism."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import Problem
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.words import Technique, Word, flag

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    if plan.sp and plan.mesh.size_of(TENSOR) == 1:
        yield Problem(
            "'sp' without tensor parallelism, which has no effect",
            "sp together with tpN of two ranks or more, on which the sequence is split",
            "the plan without sp, or tp2 beside it",
        )


def _beside_layers(plan: "Plan") -> str:
    between = plan.sp and any(layer.has_axes for layer in plan.layers)
    return "'sp', which shards the sequence between layers," * between


TECHNIQUE: Final = Technique(
    words=(
        Word("tpN", "tp2", "tensor parallelism on N ranks", of_layers=True),
        Word("sp", "sp", "sequence parallelism on the tensor axis"),
    ),
    fields=(flag("sp"),),
    problems=_problems,
    beside_layers=_beside_layers,
)
