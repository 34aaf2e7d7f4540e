"""Checks of a torch optimizer that a loop of the program's own steps over a wrapped module.

each step         its options equal the other data ranks'; some parameter has a gradient;
                  SparseAdam gets sparse gradients
first step        the optimizer must be elementwise, its states of pieces; or it needs whole
                  tensors, each of which one rank owns (engine/optimizer/owners.py)
load_state_dict   the same of the states
state_dict        refused: it would give one rank's pieces as whole parameters
"""

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, SparseAdam

from shardwise.agreement.checksum import versions
from shardwise.core.errors import bad
from shardwise.engine.checks import validate
from shardwise.engine.optimizer.elementwise import ELEMENTWISE, is_listed
from shardwise.engine.optimizer.optimizer_state import compared
from shardwise.engine.optimizer.owners import WHOLE, WholeSteps, needs_whole
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import owners


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before every optimizer step: examines an optimizer when it first steps on shards."""
    pairs = list(_owned(optimizer))
    owned = list(dict.fromkeys(data for _, data in pairs))
    if not owned:
        return
    _record(optimizer, owned[0])
    for p, data in pairs:
        flat, index = data.places[p][1:]
        same, grads = data.consensus.same, flat.grads
        if p.grad is None and grads.attached and grads.used[index]:
            name = "gradients set to None before a step of the optimizer"
            same.facts.setdefault(name, []).append(flat.names[index])
        elif p.grad is not None:
            same.doubts.gradient_writes += grads.is_replaced(p.grad)
    for p, data in pairs if isinstance(optimizer, SparseAdam) else ():
        flat, index = data.places[p][1:]
        p.grad = flat.grads.sparse(index)
    owners_of_pieces = list(dict.fromkeys(d for p, d in pairs if d.places[p][1].split))
    for data in owners_of_pieces:
        data.consensus.same.doubts.gradient_writes += data.scalings.gradients.look()
    if owners_of_pieces and any(optimizer not in data.optimizers for data in owned):
        _require_by_element(optimizer)
        _require_pieces(optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_post_hook(_require_pieces)
    for data in owned:
        data.optimizers.setdefault(optimizer, 0)
    for data in owners_of_pieces if needs_whole(optimizer) else ():
        if any(x is not None for x in (*args[1:], *kwargs.values())):
            raise bad(
                f"a step of {type(optimizer).__name__} with a closure on shards",
                "closures of optimizers that update each element alone",
                "loss.backward(), then optim.step()",
            )
        whole_steps(optimizer, data).begin()


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """A hook after every optimizer step: what changes its states from now on is the program."""
    for data in _sharded(optimizer) if needs_whole(optimizer) else ():
        whole_steps(optimizer, data).end()
    for data in [pair[1] for pair in islice(_owned(optimizer), 1)]:
        data.optimizers[optimizer] = versions(optimizer.state.values())
        data.scalings.weights.note()


def _record(optimizer: Optimizer, data: Data) -> None:
    """Give the options of its groups to what the ranks of a module compare, with parameter names.
    Also of groups without a parameter here: a parameter without dimensions, which one rank holds,
    may be in another group on the others.
    """
    if data.computes_loss:  # a forward pass was recorded, and no backward pass has begun
        require_gradients(optimizer)
    same, kind = data.consensus.same, type(optimizer).__name__
    options = options_of(optimizer)
    if noted := data.optimizers.get(optimizer, 0):
        options[f"changes of the states of the {kind}"] = (
            versions(optimizer.state.values()) != noted
        )
    same.stepped(kind, options)
    if (scaler := _scaler_of_step()) is not None:  # it has waited for the device
        same.facts["the scale of the gradient scaler"] = scaler.get_scale()
    new = optimizer not in data.optimizers
    for number, group in enumerate(optimizer.param_groups if new else ()):
        places = [data.places[p] for p in group["params"] if p in data.places]
        same.facts[f"parameters of group {number} of the {kind}"] = [
            flat.names[index] for _, flat, index in places if len(flat.shapes[index])
        ]


def _scaler_of_step() -> GradScaler | None:
    """The gradient scaler whose `step` calls this one of an optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def require_gradients(optimizer: Optimizer) -> None:
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise validate.no_gradient(f"a step of {type(optimizer).__name__}")


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        found |= compared(group, f"group {number} of the {type(optimizer).__name__}")
    return found


def _owned(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Data]]:
    """The optimizer's parameters of modules that are wrapped in a loop of the program's own."""
    for p, data in owners(optimizer):
        if isinstance(data, Data) and data.pace.by_hand:
            yield p, data


def whole_steps(optimizer: Optimizer, data: Data) -> WholeSteps:
    """The steps of an optimizer that needs whole tensors, over one module."""
    if optimizer not in data.whole:
        data.whole[optimizer] = WholeSteps(optimizer, data)
    return data.whole[optimizer]


def _sharded(optimizer: Optimizer) -> list[Data]:
    pieces = (data for p, data in _owned(optimizer) if data.places[p][1].split)
    return list(dict.fromkeys(pieces))


def _require_by_element(optimizer: Optimizer) -> None:
    """Raise InputError for an optimizer that is not known to update each element alone."""
    kind = type(optimizer)
    if not (getattr(optimizer, "elementwise", is_listed(kind)) or needs_whole(optimizer)):
        raise bad(
            f"a step of {kind.__name__} on shards: it is not known to update each element alone",
            f"one of {', '.join((*ELEMENTWISE, *WHOLE))}; if {kind.__name__} updates each element "
            "alone, optim.elementwise = True before its first step; if each tensor, "
            "optim.elementwise = False",
            'torch.optim.AdamW(module.parameters()), or sw.FSDP(module, "NO_SHARD"), or an engine: '
            f'sw.parallelize(module, "zero3", world, optimizer=sw.Optim({kind.__name__}, ...))',
        )


def _require_pieces(optimizer: Optimizer) -> None:
    """Raise InputError for states of whole parameters in an optimizer over pieces."""
    for data in () if needs_whole(optimizer) else _sharded(optimizer):
        for p, (_, flat, index) in data.places.items():
            shape, state = flat.shapes[index], optimizer.state.get(p, {})
            tensors = [(k, v.shape) for k, v in state.items() if isinstance(v, Tensor)]
            wrong = [k for k, size in tensors if size and size == shape]  # not the step count
            if wrong and flat.split and p.shape != shape:
                raise bad(
                    f"an optimizer whose {wrong[0]} of {flat.names[index]} is of the whole "
                    "parameter, over a module whose parameters are sharded",
                    "an optimizer made after the wrapping, and states loaded by sw.load",
                    "sw.load(module, folder, optimizer=optim), or torch.optim.AdamW("
                    "module.parameters()) after sw.FSDP(module)",
                )


def _refuse_state_dict(optimizer: Optimizer) -> None:
    """A hook before `state_dict()`, which would give one rank's pieces as whole parameters."""
    if _sharded(optimizer):
        raise bad(
            f"state_dict() of {type(optimizer).__name__} over a sharded module: it has this rank's "
            "pieces, which torch.save and torch.distributed.checkpoint take for whole parameters",
            "sw.save and sw.load, which write and read whole parameters under any number of ranks",
            "sw.save(module, folder, optimizer=optim)",
        )
