"""The shapes, dtypes and recorded passes of a model, from which bytes and memory are predicted.

It holds no tensors.  A unit is a set of parameters that is gathered and freed together, usually one
block.  A parameter that several modules share appears once, in the unit that owns it.

The tape of a forward pass is what autograd keeps of it for the backward pass, and the operations of
both passes, from which a step's time follows.  Storages are numbered in the order in which they
were first seen.  Parameters, buffers and the batch have no number: they stay in memory in any case.

    saved        autograd saved the storage in the forward of this module, the innermost running
    taken        the module takes a tensor of it as an argument
    returned     the module returns it
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shardwise.core.layouts.param_layout import AxisLayout, Layout
from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.expert.expert_moves import ExpertLayer
from shardwise.techniques.tensor.tensor_table import ModuleShape, Style, Table

# --- the tape of a forward pass -------------------------------------------------------------------

#: With activations in host memory, storages of fewer bytes stay on the device.
SMALL_BYTES: Final = 1024


class Product(NamedTuple):
    """A matrix product, a convolution or fused attention in the forward of `module`.
    `flops` is what torch's FlopCounterMode counts.  `storages` has its outputs, and is empty if
    selective recomputation computes them again.  `saves` tensors had been saved before it.
    """

    module: str
    flops: int
    storages: tuple[int, ...]
    saves: int


class Taken(NamedTuple):
    """An argument of a module. `trained`: a gradient reaches it."""

    module: str
    storage: int
    numel: int
    element_bytes: int
    trained: bool


class Operation(NamedTuple):
    """A kernel that computes for `module`, in the forward or in the backward pass.

    dtype        of its largest input, by torch's name
    flops        of a product, as torch's FlopCounterMode counts
    done_flops   what the kernel computes: causal attention computes half of `flops`
    moved_bytes  of the tensors that it reads and writes
    saves        how many tensors autograd had saved before it
    product      its place among the products of the tape; -1 for others
    """

    module: str
    backward: bool
    dtype: str
    flops: int
    done_flops: int
    moved_bytes: int
    saves: int = 0
    product: int = -1


class Tape(NamedTuple):
    """What autograd keeps of one forward pass: pairs of a module and a storage."""

    storage_bytes: tuple[int, ...] = ()
    saved: tuple[tuple[str, int], ...] = ()
    taken: tuple[Taken, ...] = ()
    returned: tuple[tuple[str, int], ...] = ()
    products: tuple[Product, ...] = ()
    last_save: tuple[tuple[str, int], ...] = ()
    operations: tuple[Operation, ...] = ()


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
    Under a `layout`, `shape` is that of a rank's part; without one, only the plan's row shards it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    layout: Layout | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Raises KeyError for a type that is not in `ELEMENT_BYTES`."""
        return ELEMENT_BYTES[self.dtype]


class TiledParam(NamedTuple):
    """The rows of a tile: number `place` of `cut`, of the parameter `name`."""

    name: str
    place: int
    cut: Cut


@dataclass(frozen=True)
class BufferShape:
    """One buffer: full name in the model, dims, element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def stored_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class UnitShape:
    """The parameters that are gathered and freed together, in their order in the flat tensor."""

    name: str
    params: tuple[ParamShape, ...]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True)
class ModelShape:
    """The units of a model, in the order of its forward pass, and its buffers."""

    units: tuple[UnitShape, ...]
    buffers: tuple[BufferShape, ...] = ()

    @property
    def params(self) -> tuple[ParamShape, ...]:
        return tuple(param for unit in self.units for param in unit.params)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def stored_bytes(self) -> int:
        return sum(param.numel * param.element_bytes for param in self.params)


class Blocks(NamedTuple):
    """The list of a model's equal blocks, by its name, and their number."""

    name: str
    number: int


class Value(NamedTuple):
    """A tensor that a module took or returned. `trained`: a gradient reached it."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool


class Call(NamedTuple):
    """The begin or the end of a module's forward.
    `values` are the numbers of the tensors that it takes (begin) or returns (end).  `recorded` is
    false under torch.no_grad(): autograd records nothing.
    """

    module: str
    begins: bool
    values: tuple[int, ...]
    recomputed: bool = False
    recorded: bool = True


class ModelPass(NamedTuple):
    """A forward and a backward pass of the plain model: the calls of its modules, in order.

    reads    the parameters that operations read, with the number of calls before each
    rows     the attentions of a rank of `cp` (context/positions.py)
    note     what depends on the values of the batch
    unused   the trained parameters that have no gradient
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    tape: Tape = Tape()
    rows: tuple[Any, ...] = ()
    note: str = ""
    unused: frozenset[str] = frozenset()
    reads: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class UnitModules:
    """The modules of a unit, in order of definition. `encloses`: they contain modules of other
    units.  `looks_up`: all of them are embeddings, whose backward pass does not read the weights.
    """

    modules: tuple[str, ...]
    encloses: bool = False
    looks_up: bool = False


@dataclass(frozen=True)
class StageSpec:
    """A model cut into stages.

    params    the stages of each parameter: several of a tied one
    layers    the stages of each layer; modules and buffers in no layer are on every rank
    graded    whether a gradient comes back across each boundary
    outside   the parameters that each stage reads outside of its layers
    parts     the stages of layers that are parts of other layers too, by their first names
    """

    params: dict[str, tuple[int, ...]]
    layers: dict[str, tuple[int, ...]]
    graded: tuple[bool, ...]
    outside: tuple[frozenset[str], ...]
    parts: dict[str, tuple[int, ...]]

    @property
    def number(self) -> int:
        return 1 + len(self.graded)

    def of(self, name: str) -> tuple[int, ...]:
        """The stages of the layer that contains the module or buffer `name`; () if none does."""
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name, ())


@dataclass(frozen=True)
class TensorSpec:
    """A model under a table of styles.

    styles, modules   by the names of modules
    params            params[module][name]: the full name of a parameter of a module with a style
    experts           the layouts of parameters of layers of experts that have no style
    """

    table: Table
    sp: bool
    styles: dict[str, Style]
    modules: dict[str, ModuleShape]
    params: dict[str, dict[str, str]]
    experts: dict[str, AxisLayout]


@dataclass(frozen=True)
class Facts:
    """What a model says about the layouts of its parameters, and a plan does not (layouts.py).

    tensors   by the number of the plan of layers whose mesh has the tensor axis; 0: the model's
    experts   the layouts on the axis `ep` of the parameters that it cuts
    stages    the stages of each parameter in a pipeline
    tiles     the rows of the parameters of tiles, by their names: "head.tiles.0.weight"
    """

    tensors: Mapping[int, TensorSpec] = field(default_factory=dict[int, TensorSpec])
    experts: Mapping[str, AxisLayout] = field(default_factory=dict[str, AxisLayout])
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    tiles: Mapping[str, TiledParam] = field(default_factory=dict[str, TiledParam])

    def plain(self, name: str) -> str:
        """The name of the model's parameter whose rows are in the parameter `name` of a tile."""
        return self.tiles[name].name if name in self.tiles else name


@dataclass(frozen=True)
class ModelSpec:
    """The plain model as numbers, before any rank holds a part of it.

    shape          full parameters, in units in order of definition; `modules` has an entry for each
    run            one recorded pass on the meta device
    stages         None without a pipeline; `tensors`: None without a tensor axis
    recomputed     "full" or "selective", by the names of recomputed modules
    experts        the layouts on the axis `ep`, by the names of the parameters that it cuts
    expert_layers  by name
    layers         the styles of layers with a mesh of their own, by the number of their plan
    """

    shape: ModelShape
    modules: tuple[UnitModules, ...]
    run: ModelPass
    stages: StageSpec | None = None
    tensors: TensorSpec | None = None
    recomputed: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: Mapping[str, AxisLayout] = field(default_factory=dict[str, AxisLayout])
    expert_layers: Mapping[str, ExpertLayer] = field(default_factory=dict[str, ExpertLayer])
    layers: Mapping[int, TensorSpec] = field(default_factory=dict[int, TensorSpec])
    tiles: Mapping[str, TiledParam] = field(default_factory=dict[str, TiledParam])

    @property
    def facts(self) -> Facts:
        tensors = {**self.layers} if self.tensors is None else {0: self.tensors, **self.layers}
        return Facts(tensors, self.experts, self.stages.params if self.stages else {}, self.tiles)
