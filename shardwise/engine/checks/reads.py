"""Reads of a parameter where this rank has only a piece of it.

    model.head.weight          in a loss, or in a method other than forward
    model.get_encoder()(ids)   modules whose parameters the root gathers

A module keeps its parameters in a table, which `module.weight` reads.  On a sharded module the
table is a `Parameters`.  In a forward pass, and where autograd records a loss that follows one, it
gathers the full value, on all ranks, and gives the parameter; its unit stays gathered until the end
of the pass.  At other times it gives a `Read`, which has its shape, dtype and device, and gathers
before the first operation that needs the values.  A weight that is split over tensor ranks has no
full value to gather: an operation on it outside of its layer raises.

`module.parameters()` gives full parameters at the same times, for norms, terms of a loss, and
momentum encoders; at others this rank's pieces, on which optimizers and averages of weights work.
"""

from collections import defaultdict
from collections.abc import Callable, ItemsView, Sequence, ValuesView
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.core.errors import bad
from shardwise.core.tools.tree import mapped
from shardwise.engine.precision import HALF
from shardwise.flat.flat_parameter import Flat, State
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Unit, owners

#: Questions about a tensor that need none of its values.
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("itemsize", "nbytes")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
#: What the parameter itself answers, full or not.
_OF_PARAMETER = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("grad_fn", "retains_grad")),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad),
        Tensor.register_post_accumulate_grad_hook,
    ]
)


class Read(Tensor):
    """A parameter that was read: `of`, on `place`; `gather` makes its full value be there."""

    _is_param = True  # isinstance(read, nn.Parameter)
    of: nn.Parameter
    place: torch.device
    gather: Callable[[], None]

    @staticmethod
    def made(
        of: nn.Parameter, shape: torch.Size, like: Tensor, gather: Callable[[], None]
    ) -> "Read":
        """A read of the parameter `of`: its full value has `shape`, and is in memory as `like`."""
        read = torch.empty(shape, dtype=like.dtype, device="meta").as_subclass(Read)
        vars(read).update(of=of, place=like.device, gather=gather)
        return read

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer questions about the tensor; for everything else gather first."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (Tensor.eq, Tensor.__eq__) and _are_one(*args):
            return True
        values = func not in _OF_PARAMETER

        def parameter(read: Read) -> Tensor:
            if values:
                read.gather()
            return read.of

        args, kwargs = mapped(parameter, (tuple(args), dict(kwargs or {})), Read)
        return func(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return self.place

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["of"], name)

    def __hash__(self) -> int:
        return hash(self.of)

    def __repr__(self, **_: Any) -> str:
        return f"Parameter of shape {tuple(self.shape)}, of which this rank holds a part"


def _are_one(x: Any, y: Any) -> bool:
    """Whether two objects are one parameter, so that it is found in a set or a dict."""
    if x is y:
        return False  # by elements, as of any tensor
    return (x.of if isinstance(x, Read) else x) is (y.of if isinstance(y, Read) else y)


class Parameters(dict[str, nn.Parameter | None]):
    """The parameters of one module by name; `readers` give what an attribute's read returns."""

    def __init__(self, table: dict[str, nn.Parameter | None]) -> None:
        super().__init__(table)
        self.readers: dict[str, list[Callable[[], Tensor | None]]] = defaultdict(list)
        self.iterated: list[Callable[[], None]] = []

    def __setitem__(self, name: str, p: nn.Parameter | None) -> None:
        super().__setitem__(name, p.of if isinstance(p, Read) else p)  # tied by hand

    def __getitem__(self, name: str) -> Any:
        for reader in self.readers.get(name, ()):
            if (found := reader()) is not None:
                return found
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, nn.Parameter | None]:
        """All parameters, in the form for a loop over `module.parameters()`."""
        for act in self.iterated:
            act()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:
        for act in self.iterated:
            act()
        return super().values()

    def __reduce__(self) -> Any:  # a copy of the module is plain
        return dict, (dict(super().items()),)


#: By this attribute transformers knows FSDP's modules: every rank runs as many passes in its
#: `generate()` as the longest text needs, where otherwise the others would wait for a rank.
TOGETHER: Final = "_is_fsdp_managed_module"


class _Plain:
    """The handle of a module: `remove` gives it a plain table again, without that attribute."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        vars(self.module).pop(TOGETHER, None)
        self.module._parameters = dict(dict.items(self.module._parameters))


def _guarded(module: nn.Module) -> Parameters:
    if not isinstance(module._parameters, Parameters):
        module._parameters = Parameters(module._parameters)
    return module._parameters


def guard_shards(model: nn.Module, data: Data, *, together: bool = False) -> list[Any]:
    """Let reads of the parameters that `data` shards gather them.  Handles undo it.
    together: ranks must make the same number of forward passes, also if nothing is sharded.
    """
    reads, handles = _Reads(data), list[_Plain]()
    readers: dict[int, Callable[[], Tensor | None]] = {}
    places = {
        id(p): (unit, flat, index)
        for unit in data.units.order
        for flat in unit.groups
        for index, p in enumerate(flat.params)
        if flat.moves_to_rest or flat.dtype in HALF  # whose masters follow the program's writes
    }
    for module in model.modules():
        if data.staged is None and (data.split or together) and hasattr(type(module), "generate"):
            vars(module)[TOGETHER] = True
            handles.append(_Plain(module))
        own = {name: id(p) for name, p in module._parameters.items() if id(p) in places}
        if not own:
            continue
        table = _guarded(module)
        handles.append(_Plain(module))
        for name, key in own.items():
            if key not in readers:  # tied names give the same object
                readers[key] = reads.reader(*places[key])
            table.readers[name].append(readers[key])
        units = dict.fromkeys(places[key][0] for key in own.values())
        table.iterated.append(partial(reads.iterated, tuple(units)))
    return handles


def _computes(data: Data) -> bool:
    """Whether a forward pass runs, or runs again, or autograd records a loss that follows one."""
    recorded = data.computes_loss or data.order.in_backward
    return data.staged is None and (data.in_root or (recorded and torch.is_grad_enabled()))


def _gather(data: Data, unit: Unit) -> None:
    """Gather a unit for a read, unless it is gathered for a call that runs, or runs again."""
    there = all(group.state is State.UNSHARDED for group in unit.groups)
    if not (unit.state.depth or (data.order.in_backward and there)):
        data.open(unit)


class _Reads:
    """The reads of one model's shards.  Tables outlive its hooks, so it keeps these weakly."""

    def __init__(self, data: Data) -> None:
        self.data = ref(data)

    def reader(self, unit: Unit, flat: Flat, index: int) -> Callable[[], Tensor | None]:
        """A function that gives the read of a parameter; None where its full value is there."""
        made: list[Read] = []

        def read() -> Tensor | None:
            """The read of the parameter, one object for all its names."""
            data = self.data()
            if data is None or not data.in_step:
                flat.looked = True  # between steps, the program may write to it
            elif data.staged is not None:
                return None
            if data is not None and flat.moves_to_rest and _computes(data):
                _gather(data, unit)  # an autograd.Function takes no Read
            if flat.state is State.UNSHARDED:
                return None
            if not made:
                p, gather = flat.params[index], partial(self.gather, unit)
                made.append(Read.made(p, flat.shapes[index], flat.full, gather))
            return made[0]

        return read

    def gather(self, unit: Unit) -> None:
        data = self.data()
        if data is not None:
            data.open(unit)
            for group in unit.groups:  # as in `read`: the program may have kept it
                group.looked |= not data.in_step

    def iterated(self, units: Sequence[Unit]) -> None:
        """Before a loop over parameters: full ones while a loss is computed, else pieces."""
        data = self.data()
        if data is None:
            return
        for group in (group for unit in units for group in unit.groups):
            group.looked = True
        if data.staged is not None and data.in_step:
            return
        # an engine computes no loss but its own
        loss = data.computes_loss and data.staged is None and not data.pace.by_hand
        full = loss or _computes(data)
        for unit in units:
            if full:
                _gather(data, unit)
                continue
            if not (data.pace.by_hand or unit.reshards):
                unit.keep_open()  # of zero1 and zero2, as before the first step
                continue
            unit.examined &= not torch.is_grad_enabled()  # autograd may record pieces
            if unit.opened and not unit.recorded:
                unit.close()
                unit.to_sharded()


def guard_layer(module: nn.Module, names: Sequence[str], whose: str) -> None:
    """Let reads of parameters split over tensor ranks raise, unless `module` itself computes.
    `names` are of parameters in `module`, whose own name is `whose`.
    """
    table, running = _guarded(module), [0]

    def enter(*_: object) -> None:
        running[0] += 1

    def leave(*_: object) -> None:
        running[0] -= 1

    for name in names:
        table.readers[name].insert(0, _layer_reader(module, name, f"{whose}.{name}", running))
    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _layer_reader(
    module: nn.Module, name: str, path: str, running: list[int]
) -> Callable[[], Tensor | None]:
    def refuse() -> None:
        raise bad(
            f"{path}, of which each tensor rank holds a part, computed with outside of its layer",
            "the layer's own forward, which moves its inputs and outputs between the ranks",
            f"model.{path.rpartition('.')[0]}(x), or a table of styles without this layer",
        )

    owner = ref(module)  # a layer of another stage is freed without a collection of garbage

    def read() -> Tensor | None:
        of = owner()
        p = None if of is None else of._parameters.get(name)
        # in a backward pass, the layer's forward is recomputed without its hooks
        inside = running[0] or torch._C._current_graph_task_id() != -1
        return None if inside or p is None else Read.made(p, p.shape, p.data, refuse)

    return read


def prepare(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: parameters that were read become themselves, and pieces where they rest."""
    for group in optimizer.param_groups:
        if any(type(p) is Read for p in group["params"]):
            group["params"] = [p.of if type(p) is Read else p for p in group["params"]]
    for data in dict.fromkeys(data for _, data in owners(optimizer) if isinstance(data, Data)):
        if data.computes_loss or any(unit.opened for unit in data.units.order):
            data.units.to_sharded()


register_optimizer_step_pre_hook(prepare)
