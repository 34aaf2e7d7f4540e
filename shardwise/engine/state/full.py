"""`sw.full_state_dict`: the full state of a model on rank 0, in host memory.

    rank 0   | box | box |        copies its own boxes
    rank 1         | box | box |  sends boxes to rank 0, one at a time
    rank 2                | ...   so rank 0's device holds at most one box more than its own

A box (box.py) says where a rank's elements are in the full tensor.  Keys and their order are those
of the plain module; tied parameters appear under each of their names.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.move import receive, send
from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.tools.structure import plain_key, uncompiled
from shardwise.engine.checks import validate
from shardwise.engine.engine import Engine
from shardwise.engine.state import extra_state, state
from shardwise.engine.state.box import Box, block
from shardwise.techniques.data.apply import driver_of, flats_of
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.pipeline.trace.interceptor import StandIn
from shardwise.wrap.pipe import Piped, pipe_of

#: The last part of a key of what `get_extra_state` gives.
EXTRA: Final = "_extra_state"


@normal_mode()
def full_state_dict(module_or_engine: nn.Module | Engine) -> dict[str, Any]:
    """All parameters and persistent buffers, full, on rank 0 as CPU tensors.

    All ranks must call it; ranks other than 0 get an empty dict.  It accepts an engine, or a module
    wrapped by sw.DDP, sw.FSDP or sw.Pipe.  The keys are those of the plain module's `state_dict()`,
    so `load_state_dict` of a plain module accepts the result.  For weights trained in 16 bits the
    result has the fp32 masters.  Rank 0 needs host memory for the full model; on its device each
    rank needs at most one unit more than usual.

    Raises:
        InputError: a module that is not wrapped.
    """
    if isinstance(module_or_engine, Engine):
        engine = module_or_engine
        engine.flush()
        engine.wait()
        engine.consensus.meet()
        boxes = [
            *state.weights(engine.flats, engine.optimizer),
            *state.buffers(engine.model, engine.sharded),
            *(extra_state.as_boxes(engine.model, engine.sharded.copy) if engine.staging else ()),
        ]
        return _full(plain_of(engine), boxes, engine.world.everyone, engine.world.device)
    validate.module(module_or_engine, "sw.full_state_dict")
    for module in (module_or_engine, uncompiled(module_or_engine)):
        piped = pipe_of(module)
        if piped is not None:
            piped.structure.require_unchanged()
            piped.compare_ranks()
            stages = piped.staged.stages
            extra = extra_state.as_boxes(module, piped.staged.copy)
            boxes = [*pipe_boxes(module, piped), *extra]
            return _full(stages.layers.twin, boxes, piped.staged.axis, stages.device)
        data = driver_of(module)
        if data is not None:
            data.structure.require_unchanged()
            data.compare_ranks()
            device = flats_of(data.units.order)[0].full.device
            shard, replicate = data.consensus.axes
            if replicate.rank:  # only the first replica sends
                return {}
            return _full(module, data_boxes(module, data), shard, device)
    raise bad(
        f"sw.full_state_dict of a plain {type(module_or_engine).__name__}",
        "an engine, or a module wrapped by sw.DDP, sw.FSDP or sw.Pipe",
        "module.state_dict()",
    )


def plain_of(engine: Engine) -> nn.Module:
    """A module with all names of the plain model; under a pipeline it is on the meta device."""
    return engine.staging.stages.layers.twin if engine.staging else engine.model


def data_boxes(module: nn.Module, data: Data) -> list[Box]:
    found = [box for flat in flats_of(data.units.order) for box in state.boxes_of(flat, "model")]
    rank = data.consensus.axes[0].rank
    return [*found, *_whole("buffer", module.named_buffers(), lambda _: rank)]


def pipe_boxes(module: nn.Module, piped: Piped) -> list[Box]:
    """The weights and buffers that a rank of sw.Pipe holds."""
    named = {name: (p, copy) for name, p, copy in pipe_names(module, piped)}
    pairs = [(name, p) for name, (p, _) in named.items()]
    return [
        *_whole("model", pairs, lambda name: named[name][1]),
        *_whole("buffer", module.named_buffers(), piped.staged.copy),
    ]


def pipe_names(module: nn.Module, piped: Piped) -> Iterator[tuple[str, nn.Parameter, int]]:
    """The parameters of a rank of sw.Pipe, by their names in the plain module.
    The number is this rank's index among the parameter's holders.
    """
    layers, ties = piped.staged.stages.layers, piped.staged.ties
    for p in module.parameters():
        name = layers.parameters[layers.numbers[id(p)]][0]
        yield name, p, ties[name].rank if name in ties else 0


def _whole(
    kind: str, named: Iterable[tuple[str, Tensor]], replica: Callable[[str], int]
) -> list[Box]:
    return [Box.full(f"{kind}/{plain_key(name)}", t.detach(), replica(name)) for name, t in named]


# --- keys ------------------------------------------------------------------------------------


def entries(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the plain module's state_dict, with its tensor or extra state.
    For layers of other pipeline stages these are the tensors on the meta device.
    """
    for key, p in dict.items(module._parameters):  # one rank asks: nothing may be gathered
        if p is not None:
            yield f"{prefix}{key}", p
    for key, b in module._buffers.items():
        if b is not None and key not in module._non_persistent_buffers_set:
            yield f"{prefix}{key}", b
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield f"{prefix}{EXTRA}", module.get_extra_state()
    for key, child in module._modules.items():
        if child is not None:
            inner = vars(child)["_of"].twin if isinstance(child, StandIn) else child
            yield from entries(inner, f"{prefix}{key}.")


def is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA


def _full(whole: nn.Module, boxes: list[Box], axis: Axis, device: torch.device) -> dict[str, Any]:
    arrived = collected(boxes, axis, device)
    if axis.rank:
        return {}
    named = [(plain_key(key), value) for key, value in entries(whole)]
    extra = extra_state.from_boxes(arrived)  # of stages; elsewhere it is this rank's
    names: dict[int, list[str]] = defaultdict(list)
    for key, value in named:
        kind = "model" if isinstance(value, nn.Parameter) else "buffer"
        names[id(value)] += [] if is_extra(key) else [f"{kind}/{key}"]
    return {
        key: extra.get(key[: -len(EXTRA)].removesuffix("."), value)
        if is_extra(key)
        else arrived[next(n for n in names[id(value)] if n in arrived)]
        for key, value in named
    }


# --- sending and receiving boxes -------------------------------------------------------------


@torch.no_grad()
def collected(boxes: Sequence[Box], axis: Axis, device: torch.device) -> dict[str, Tensor]:
    """The full tensors of all boxes, as CPU tensors on rank 0; nothing on other ranks."""
    found: dict[str, Tensor] = {}
    mine = [box for box in boxes if box.replica == 0]
    with axis.ledger.phase("state"):
        if axis.rank:
            _send_all(mine, axis, device)
            return {}
        for box in mine:
            _place(found, box.name, box.shape, box.offsets, box.tensor)
        for source in range(1, axis.size):
            count = receive(torch.zeros(1, dtype=torch.int64, device=device), axis, source)
            text = torch.empty(int(count), dtype=torch.uint8, device=device)
            listed = bytes(receive(text, axis, source).cpu().numpy()).decode()
            for name, shape, offsets, sizes, dtype in json.loads(listed):
                values = torch.empty(sizes, dtype=getattr(torch, dtype), device=device)
                receive(_bytes(values), axis, source)
                _place(found, name, shape, offsets, values)
    return found


def _send_all(boxes: Sequence[Box], axis: Axis, device: torch.device) -> None:
    listed = [
        (box.name, box.shape, box.offsets, box.sizes, str(box.tensor.dtype).removeprefix("torch."))
        for box in boxes
    ]
    text = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
    send(torch.tensor([text.numel()], dtype=torch.int64, device=device), axis, 0)
    send(text.to(device), axis, 0)
    for box in boxes:
        send(_bytes(box.tensor.to(device).contiguous()), axis, 0)  # it may be on the host


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _place(
    found: dict[str, Tensor],
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    values: Tensor,
) -> None:
    whole = found.get(name)
    if whole is None:
        whole = found[name] = torch.empty(tuple(shape), dtype=values.dtype, device="cpu")
    block(whole, offsets, values.shape).copy_(values)
