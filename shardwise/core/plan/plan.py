"""The plan: the parallel strategy of a run as one value, with a text form that round-trips.

    dp2 zero3 bf16              2 ranks, all states sharded, computation in bfloat16
    dp_replicate2 dp_shard4 zero2 accumulate:4
    dp2 tp2 pp2 zero1 1f1b:8 bf16
    dp4 zero3 | embed,head: tp4 zero1         layers with a plan of their own (layer_plan.py)

Words come in any order; a word left out has its default. A plan without a data axis runs on any
world whose size its other axes divide: `completed` adds the `dp` axis. A `Plan` can hold anything
that the words can say; plan_check.py decides whether this version can run it.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwise.core.errors import bad
from shardwise.core.mesh import AXES, CONTEXT, Mesh
from shardwise.core.plan.plan_parser import WORDS, read, words_of, words_table
from shardwise.core.plan.words import Word
from shardwise.core.schedule.library import allowed
from shardwise.core.zero import ALIASES, Row, row_of
from shardwise.techniques.context.word import ContextWord
from shardwise.techniques.layers.layer_plan import LayerPlan, split_layers
from shardwise.techniques.offload.word import Offload
from shardwise.techniques.offload.word import parse as parse_offload
from shardwise.techniques.recompute.word import PARTITIONED_WORDS, recompute_budget
from shardwise.techniques.tile.word import TileWord
from shardwise.techniques.tile.word import parse as parse_tile

__all__ = ["WORDS", "Plan", "Word", "words_table"]

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Plan:
    """A parallel strategy. Equal strategies are equal values: axes are sorted, fsdp is zero3.

    axes        names and sizes
    row         the word of a row of the states table
    precision   None: the default of the command or engine that runs the plan
    accumulate  microbatches per step
    context     the axis of positions
    schedule, recompute, activations, offload, tile
                as written
    stages      the blocks of each pipeline stage; None: balanced
    device_memory_bytes
                the most that a rank may store on its device
    layers      plans of single layers

    Raises InputError for a value that no plan word can set.
    """

    axes: tuple[tuple[str, int], ...] = ()
    context: ContextWord | None = None
    sp: bool = False
    row: str = "ddp"
    schedule: str | None = None
    stages: tuple[int, ...] | None = None
    precision: str | None = None
    accumulate: int = 1
    bucket_bytes: int = BUCKET_BYTES
    recompute: str | None = None
    activations: str | None = None
    offload: str | None = None
    tile: str | None = None
    buffers_bytes: int | None = None
    arenas: bool = False
    device_memory_bytes: int | None = None
    layers: tuple[LayerPlan, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.axes, str):
            text = f'Plan.parse("{self.axes}")'
            raise bad(f'Plan("{self.axes}")', "Plan.parse for a text of plan words", text)
        place = {name: place for place, name in enumerate(AXES)}
        axes = sorted(((n, size) for n, size in self.axes), key=lambda a: place.get(a[0], 0))
        object.__setattr__(self, "axes", tuple(axes))
        written = self.row.startswith("row:")
        row = str(row_of(self.row)) if written else ALIASES.get(self.row, self.row)
        object.__setattr__(self, "row", row)
        read(self.words)  # values must obey the rules of the words

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Parse a plan. Raises InputError that lists every wrong word."""
        words, layers = split_layers(text)
        return cls(**read(words), layers=layers)

    def __str__(self) -> str:
        """The canonical text: axes outermost first, then the other words, without defaults."""
        return " | ".join([self.words, *map(str, self.layers)])

    @property
    def words(self) -> str:
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        set_here = {n: value for n, (value, default) in values.items() if value != default}
        set_here.pop("layers", None)
        return words_of(set_here) or "ddp"

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the plan's axes, without `ep` and `cp`, which divide the data ranks."""
        sizes = {name: size for name, size in self.axes if name != "ep"}
        if self.cp > 1:
            sizes[self.inner_data_axis] = sizes.get(self.inner_data_axis, 1) * self.cp
        return Mesh(tuple(sizes.items()))

    @property
    def cp(self) -> int:
        """The number of data ranks over which the positions of a sequence are distributed."""
        return 1 if self.context is None else self.context.ranks

    @property
    def ep(self) -> int:
        """The number of data ranks over which experts are distributed."""
        return dict(self.axes).get("ep", 1)

    @property
    def inner_data_axis(self) -> str:
        """The innermost data axis, which `ep` divides into `edp` groups of `ep` neighbours."""
        return self.shard_axis or "dp"

    def of_layers(self, number: int) -> "Plan":
        """The plan of the layers of `layers[number - 1]`; 0: of all other layers.
        The axes that it names replace those of the model except `pp`; ranks left over are `dp`.
        """
        whole = replace(self, layers=())
        if not number:
            return whole
        found = self.layers[number - 1].fields
        if "axes" in found:
            kept = tuple(axis for axis in self.mesh.axes if axis[0] == "pp")
            found = found | {"axes": (*kept, *found["axes"])}
        return replace(whole, **found).completed(self.size)

    @property
    def of_all_layers(self) -> "list[Plan]":
        return [self.of_layers(number) for number in range(len(self.layers) + 1)]

    @property
    def gathers(self) -> bool:
        return any(each.states.moves().reshards for each in self.of_all_layers)

    def layer_of(self, name: str) -> int:
        """The number of the first plan that matches a module or one around it; 0: the model's."""
        parts = name.split(".") if self.layers else []
        outer = [".".join(parts[: n + 1]) for n in range(len(parts))]
        found = (n for n, layer in enumerate(self.layers, 1) if any(map(layer.matches, outer)))
        return next(found, 0)

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """The sizes of `tp`, of the model and of layers, ascending: rows move between them."""
        return tuple(sorted({plan.mesh.size_of("tp") for plan in self.of_all_layers}))

    def size_of(self, axis: str) -> int:
        """The number of ranks of an axis; "dp.n", "tp.n": in the mesh of `layers[n - 1]`."""
        name, _, number = axis.partition(".")
        if number:
            return self.of_layers(int(number)).size_of(name)
        if axis == "edp":
            return self.mesh.size_of(self.inner_data_axis) // self.ep
        found = {"ep": self.ep, CONTEXT: self.cp}.get(axis)
        return self.mesh.size_of(axis) if found is None else found

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of a global rank on each axis of the mesh, and on `ep`, `edp` and `cp`."""
        here = self.mesh.coordinate(rank)
        here[CONTEXT] = here.get(self.inner_data_axis, 0) % self.cp
        edp, ep = divmod(here.get(self.inner_data_axis, 0), self.ep)
        for number, layers in enumerate(self.layers, 1):
            if layers.has_axes:
                own = self.of_layers(number).mesh.coordinate(rank)
                here |= {f"{axis}.{number}": place for axis, place in own.items()}
        return here | {"ep": ep, "edp": edp}

    @property
    def size(self) -> int:
        """The number of ranks of the named axes; an `open` plan runs on multiples of it."""
        return self.mesh.size

    @property
    def open(self) -> bool:
        """Whether the plan names no data axis, so that the world's size determines it."""
        return not any(name.startswith("dp") for name, _ in self.axes)

    def completed(self, ranks: int | None = None) -> "Plan":
        """The plan for a world of `ranks`, with `dp` added if it is open.
        None means the smallest world on which every word has an effect: `zero3` becomes
        `dp2 zero3`, `tp2` stays. A plan that does not fit the world is returned unchanged.
        """
        if not self.open:
            return self
        if ranks is None:
            least = 2 if self.size == 1 or (self.row != "ddp" and self.cp == 1) else 1
            ranks = math.lcm(self.size * max(least, self.ep), *self._layer_ranks)
        data, over = divmod(ranks, self.size)
        return self if over or data <= 1 else replace(self, axes=(*self.axes, ("dp", data)))

    @property
    def _layer_ranks(self) -> list[int]:
        axes = (layer.fields.get("axes", ()) for layer in self.layers)
        return [math.prod(size for _, size in own) * self.mesh.size_of("pp") for own in axes]

    @property
    def pipeline(self) -> str | None:
        """The pipeline's schedule, 1f1b by default; None without a pipeline."""
        ranks = self.mesh.size_of("pp")
        return self.schedule or (f"1f1b:{2 * ranks}" if ranks > 1 else None)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches per step on each rank, over all runs of the schedule."""
        if self.pipeline is None:
            return self.accumulate
        return self.accumulate * allowed(self.pipeline, self.mesh.size_of("pp"))[1].m

    @property
    def recompute_budget_bytes(self) -> int:
        return recompute_budget(self.recompute)

    @property
    def partitioned(self) -> bool:
        return self.recompute in PARTITIONED_WORDS

    @property
    def activations_on_host(self) -> bool:
        return self.activations == "host" or self.recompute == "partitioned-host"

    @property
    def cut(self) -> str:
        words = [self.pipeline] if self.pipeline else []
        return " ".join(words + [f"accumulate:{self.accumulate}"] * (self.accumulate > 1))

    @property
    def states(self) -> Row:
        """The row of the states table, with the tiers on which `offload` lets states rest."""
        row, offload = row_of(self.row), self.offloaded
        if offload is None:
            return row
        return replace(row, param_tier=offload.param_tier, optim_tier=offload.optim_tier)

    @property
    def offloaded(self) -> Offload | None:
        return None if self.offload is None else parse_offload(self.offload)

    @property
    def tiled(self) -> TileWord | None:
        return None if self.tile is None else parse_tile(self.tile)

    @property
    def shard_axis(self) -> str | None:
        if not row_of(self.row).sharded:
            return None
        return "dp_shard" if "dp_shard" in dict(self.axes) else "dp"

    @property
    def replicate_axis(self) -> str | None:
        if "dp_replicate" in dict(self.axes):
            return "dp_replicate"
        return None if row_of(self.row).sharded else "dp"

    @property
    def data_size(self) -> int:
        """The number of data ranks: over them states are sharded and gradients summed."""
        mesh = self.mesh
        return mesh.size_of("dp") * mesh.size_of("dp_replicate") * mesh.size_of("dp_shard")

    @property
    def shares(self) -> int:
        """The number of shares of the batch: the ranks of `cp` have the same rows."""
        return self.data_size // self.cp
