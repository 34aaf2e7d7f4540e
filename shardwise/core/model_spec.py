"""A model as numbers: what predictions of bytes and memory need to know of it, without its tensors.

A unit is what is gathered and freed at once, a block of the model as a rule. A parameter that
several modules share appears once, in the unit that owns it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.layout import Placement
from shardwise.core.param_layout import Layout
from shardwise.core.styles import ModuleShape, Style
from shardwise.core.tensor_plan import Table

#: Bytes of one element, by torch's name of the type.
ELEMENT_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class ParamShape:
    """One parameter: full name in the model, dims, element type by torch's name, trainability.

    `shape` is of a rank's part where `layout` cuts it on some axis; without a layout the parameter
    is held as the plan's row says, and is the same on all other axes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    layout: Layout | None = None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element. Raises KeyError for a type that is not in `ELEMENT_BYTES`."""
        return ELEMENT_BYTES[self.dtype]


@dataclass
class Crossing:
    """One move of an activation on the tensor axis, in the forward pass or made again in backward.

    `numel` elements in the whole, padding included; `returns` counts the gradients that came back.
    """

    src: Placement
    dst: Placement
    numel: int
    element_bytes: int
    phase: str = "forward"
    returns: int = 0

    def come_back(self) -> None:
        """A gradient goes back the way that the activation came."""
        self.returns += 1


class CutLoss(NamedTuple):
    """One cross-entropy of logits that stay cut: its positions, and what its sums are of."""

    positions: int
    smoothing: bool
    element_bytes: int


class Crossed(NamedTuple):
    """One tensor that went from a stage to another, forward or as a gradient backward."""

    phase: str
    numel: int
    element_bytes: int


@dataclass(frozen=True)
class BufferShape:
    """One buffer: full name in the model, dims, element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class UnitShape:
    """The parameters that are gathered and freed together, in the order they are laid out.

    `uses` is how often a forward pass finds it freed and needs it whole: once for each time that
    it is called. `again`: so often a backward pass; 0 where that wants it while it is still whole,
    or does not read it at all. Of a pipeline `uses` are those of a run of the schedule.
    """

    name: str
    params: tuple[ParamShape, ...]
    uses: int = 1
    again: int = 1

    @property
    def numel(self) -> int:
        """How many elements its parameters have, padding apart."""
        return sum(param.numel for param in self.params)


@dataclass(frozen=True)
class ModelShape:
    """The units of a model, in the order of its forward pass, and its buffers."""

    units: tuple[UnitShape, ...]
    buffers: tuple[BufferShape, ...] = ()

    @property
    def params(self) -> tuple[ParamShape, ...]:
        """Every parameter, in the order of the units."""
        return tuple(param for unit in self.units for param in unit.params)

    @property
    def numel(self) -> int:
        """How many elements its parameters have, padding apart."""
        return sum(unit.numel for unit in self.units)


class Value(NamedTuple):
    """A tensor that a module took or returned. `trained`: a gradient reached it."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool


class Call(NamedTuple):
    """A module's forward begins, with the numbers of the tensors it takes, or ends, with those it
    returns.
    """

    module: str
    begins: bool
    values: tuple[int, ...]
    recomputed: bool = False


class ModelPass(NamedTuple):
    """A forward and a backward pass of the plain model: the calls of its modules, in their order.

    `saved` are the bytes that autograd keeps from forward to backward, by the innermost module in
    whose forward it kept them. `losses` are the cross-entropies of logits that stay cut over tensor
    ranks, and `joins` the shapes and the types of logits that are gathered. `note` says what
    depends on the values of the batch.
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    saved: tuple[tuple[str, int], ...] = ()
    losses: tuple[CutLoss, ...] = ()
    joins: tuple[Value, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class UnitModules:
    """The modules of a unit, in the order in which they are defined.

    `encloses`: they contain modules of other units. `looks_up`: all of them are embeddings, whose
    backward pass does not read the weights.
    """

    modules: tuple[str, ...]
    encloses: bool = False
    looks_up: bool = False


class StageTensor(NamedTuple):
    """A tensor that goes from one stage to the next. `trained`: its gradient comes back."""

    numel: int
    element_bytes: int
    trained: bool


#: What crosses each cut between stages, for one microbatch.
Bundles = tuple[tuple[StageTensor, ...], ...]


@dataclass(frozen=True)
class StageSpec:
    """A model cut into stages.

    `params` and `layers` have the stages of each by its name; a tied parameter has several. What
    belongs to no layer is on every rank. `bundles` has an entry for each microbatch of a step.
    """

    params: dict[str, tuple[int, ...]]
    layers: dict[str, tuple[int, ...]]
    bundles: tuple[Bundles, ...]

    def of(self, name: str) -> tuple[int, ...]:
        """The stages of the layer that has the module or the buffer of that name; () for none."""
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name, ())


@dataclass(frozen=True)
class TensorSpec:
    """A model under a table of styles.

    `styles` and `modules` are by the names of modules; `params` are the full names of parameters of
    those that have a style, by the module and then by the name in it. `runs` has the pass of each
    microbatch of a step, of which only the shapes differ.
    """

    table: Table
    sp: bool
    styles: dict[str, Style]
    modules: dict[str, ModuleShape]
    params: dict[str, dict[str, str]]
    runs: tuple[ModelPass, ...]


@dataclass(frozen=True)
class ModelSpec:
    """The plain model as numbers, before any rank holds a part of it.

    `shape` has whole parameters, in units in the order of definition; `modules` has an entry for
    each unit; `run` is what one pass on the meta device does. `stages` is None without a pipeline,
    and `tensors` without a tensor axis.
    """

    shape: ModelShape
    modules: tuple[UnitModules, ...]
    run: ModelPass
    stages: StageSpec | None = None
    tensors: TensorSpec | None = None
