"""What a model says about its layouts, and the tape of a forward pass, from which recomputation is
chosen.

It holds no tensors. The tape is what autograd keeps of a forward pass for the backward pass.
Storages are numbered in the order in which they were first seen.  Parameters, buffers and the batch
have no number: they stay in memory in any case.

    saved        autograd saved the storage in the forward of this module, the innermost running
    taken        the module takes a tensor of it as an argument
    returned     the module returns it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.layouts.uneven import Cut
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


class Tape(NamedTuple):
    """What autograd keeps of one forward pass: pairs of a module and a storage."""

    storage_bytes: tuple[int, ...] = ()
    saved: tuple[tuple[str, int], ...] = ()
    taken: tuple[Taken, ...] = ()
    returned: tuple[tuple[str, int], ...] = ()
    products: tuple[Product, ...] = ()
    last_save: tuple[tuple[str, int], ...] = ()


class PlainPass(NamedTuple):
    """A forward pass of one microbatch of the plain model, on a rank of the tensor axis.

    layers      the stages of each layer; modules in no layer are in the last of `stages`
    recomputed  "full" or "selective", by the names of recomputed modules
    experts     the names of layers of experts
    """

    tape: Tape
    stages: int
    layers: Mapping[str, tuple[int, ...]]
    recomputed: Mapping[str, str]
    experts: tuple[str, ...]

    def stage_of(self, module: str) -> int:
        """The first stage of the layer that contains the module."""
        while module and module not in self.layers:
            module = module.rpartition(".")[0]
        return min(self.layers.get(module, ()), default=self.stages - 1)


# --- what layouts follow from ---------------------------------------------------------------------


class TiledParam(NamedTuple):
    """The rows of a tile: number `place` of `cut`, of the parameter `name`."""

    name: str
    place: int
    cut: Cut


class Blocks(NamedTuple):
    """The list of a model's equal blocks, by its name, and their number."""

    name: str
    number: int


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
