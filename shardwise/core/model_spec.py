"""What a model says about its layouts. It holds no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.layouts.tensor_table import ModuleShape, Style, Table
from shardwise.core.layouts.uneven import Cut


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
