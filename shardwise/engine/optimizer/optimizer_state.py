"""The state of a torch optimizer in a checkpoint, and the options of its groups.

    state[p] = {"exp_avg": tensor, "step": tensor, "count": 4, "past": [tensor, tensor]}

    optim/exp_avg/NAME     a tensor in the shape of the parameter: boxes of this rank's piece
    optim/step/NAME        any other tensor: whole, from one of the ranks that hold the parameter
    {NAME: {"count": 4, "past": [{"tensor": "past.0"}, ...]}}       in the scalars (json_values.py)

A parameter without a state has nothing in the checkpoint, and gets none by loading.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.engine.state.box import Box
from shardwise.engine.state.json_values import pack, unpack

#: The state of one parameter, by key.
State = dict[str, Any]
#: New memory for the state of a key, of a shape and dtype.
Room = Callable[[str, Sequence[int], torch.dtype], Tensor]
#: The tensors of a checkpoint: the full shape and the dtype of each, by name.
Catalogue = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as this rank holds it.

    param     the optimizer's key: the parameter, whose data may be gathered now, or its master
    shape     the parameter's full shape
    local     the shape of this rank's piece and of its states
    boxes     the boxes of a tensor in the shape `local`, under a name
    copy      the index of this rank among the holders of the same part
    make      new memory of a shape and dtype for the state of this key
    """

    name: str
    param: Tensor
    shape: tuple[int, ...]
    local: tuple[int, ...]
    boxes: Callable[[str, Tensor], Iterable[Box]]
    copy: int
    make: Room


def outgoing(
    states: Mapping[Any, State], every: Sequence[HeldParameter]
) -> tuple[list[Box], State]:
    """The boxes of this rank's states, and the values of parameters whose first holder it is.

    Raises InputError for a value that is neither a tensor nor JSON.
    """
    found: list[tuple[HeldParameter, dict[str, Tensor]]] = []
    values: State = {}
    for held in every:
        tensors: dict[str, Tensor] = {}
        # a copy: the host thread may be creating the state
        state = dict(states.get(held.param) or {})
        what = f"the optimizer's state of {held.name}"
        packed = {key: pack(value, what, key, tensors) for key, value in state.items()}
        found.append((held, tensors))
        if held.copy == 0 and packed != {key: {"tensor": key} for key in packed}:
            values[held.name] = packed
    split = {
        key: all(tuple(t[key].shape) == held.local for held, t in found if key in t)
        for key in {key for _, tensors in found for key in tensors}
    }
    boxes = [
        box
        for held, tensors in found
        for key, value in tensors.items()
        for box in _boxes(held, key, value, split[key])
    ]
    return boxes, values


def incoming(
    states: Mapping[Any, State],
    every: Sequence[HeldParameter],
    saved: Catalogue,
    values: Mapping[str, State],
    expected: Callable[[HeldParameter], Iterable[str]] = lambda _: (),
) -> tuple[list[Box], Callable[[dict[Any, State]], None]]:
    """Boxes to fill with the states that a checkpoint has of these parameters, in new memory or
    that of `states`; and the function that then puts them into an optimizer's states.

    `expected` are the keys of a state.  For a key that a saved state lacks there is a box that the
    checkpoint does not have: loading refuses it.
    """
    keys: dict[str, list[str]] = {}
    for _, key, name in (each.split("/", 2) for each in saved if each.startswith("optim/")):
        keys.setdefault(name, []).append(key)
    split = {
        key: all(
            saved[f"optim/{key}/{held.name}"][0] == held.shape
            for held in every
            if key in keys.get(held.name, ())
        )
        for key in {key for own in keys.values() for key in own}
    }
    boxes: list[Box] = []
    found: list[tuple[HeldParameter, State]] = []
    for held in every:
        old: dict[str, Tensor] = {}
        for key, value in dict(states.get(held.param) or {}).items():
            pack(value, held.name, key, old)
        tensors: dict[str, Tensor] = {}
        for key in keys.get(held.name, ()):
            shape, dtype = saved[f"optim/{key}/{held.name}"]
            size = held.local if split[key] else shape
            tensors[key] = _room(held, key, old.get(key), size, dtype)
            boxes += _boxes(held, key, tensors[key], split[key])
        packed = values.get(held.name)
        state = dict(tensors) if packed is None else unpack({"dict": [*packed.items()]}, tensors)
        missing = sorted({*expected(held)} - state.keys()) if state else []
        boxes += [
            _whole(held, key, torch.zeros(held.shape, dtype=torch.float32, device="meta"))
            for key in missing
        ]
        found.append((held, state))

    def give(into: dict[Any, State]) -> None:
        for held, state in found:
            if state:
                into[held.param] = state
            else:
                into.pop(held.param, None)

    return boxes, give


def _room(
    held: HeldParameter, key: str, old: Tensor | None, size: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    fits = old is not None and (tuple(old.shape), old.dtype) == (size, dtype)
    if old is not None and fits and old.is_contiguous():
        return old
    return held.make(key, size, dtype)


def _boxes(held: HeldParameter, key: str, value: Tensor, split: bool) -> Iterable[Box]:
    if split and value.dim():
        return held.boxes(f"optim/{key}/{held.name}", value)
    return [_whole(held, key, value)]


def _whole(held: HeldParameter, key: str, value: Tensor) -> Box:
    return Box.full(f"optim/{key}/{held.name}", value, held.copy)


def device_of(key: str, p: Tensor, group: Mapping[str, Any]) -> torch.device:
    """The device of a state.  As in torch's load_state_dict, step counts are on the processor."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return p.device if on_device else torch.device("cpu")


# --- the options of the groups (rates, betas) -----------------------------------------------------

#: The keys of a group besides its options.
NAMING: Final = ("params", "param_names", "name")
#: Options that choose how torch computes, not what.
_HOW: Final = ("foreach", "fused", "capturable", "differentiable")

Options = Mapping[str, Any]


class GroupOptions:
    """The options of `groups`, which programs and schedulers may write, beside the specified ones;
    `rate` is the default learning rate.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], rate: float) -> None:
        self.groups, self.rate = groups, rate
        self.specified = [options(group) for group in groups]

    def _each(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.groups, self.specified, strict=True)

    @property
    def lr(self) -> float:
        return float(self.groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; groups with their own rate keep its proportion."""
        require_rate(lr, " in engine.set_lr")
        for group, first in self._each():
            group["lr"] = lr * first["lr"] / self.rate if self.rate else lr

    def compared(self) -> dict[str, Any]:
        """What must be equal on all ranks.  Raises InputError for a value of another kind than the
        specified one, and for one that is not finite.
        """
        found: dict[str, Any] = {}
        for group, first in self._each():
            called = f"the group {group['name']!r} of engine.optimizer"
            require_options(group, first, called)
            found |= compared(group, called)
        return found

    def state_dict(self) -> dict[str, Any]:
        own = [{"name": g["name"], **options(g), "params": []} for g in self.groups]
        return {"state": {}, "param_groups": own}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `state_dict` returned. Raises InputError for groups of another spec."""
        try:
            names: Any = [group["name"] for group in state_dict["param_groups"]]
        except (TypeError, KeyError):
            names = short_repr(state_dict)
        own = [group["name"] for group in self.groups]
        if names != own:
            raise bad(
                f"engine.optimizer.load_state_dict with the groups {names}",
                f"the state_dict() of an engine's optimizer with the groups {own}",
                "the same specification, or sw.load(engine, folder), which loads options that fit",
            )
        for group, saved in zip(self.groups, state_dict["param_groups"], strict=True):
            put(group, options(saved))

    def changed(self) -> dict[str, dict[str, Any]]:
        """By group and option, values that differ from the spec: [the spec's value, this one]."""
        found: dict[str, dict[str, Any]] = {}
        for group, first in self._each():
            now = options(group).items()
            pairs = {k: [first.get(k), v] for k, v in now if first.get(k) != v}
            found |= {group["name"]: pairs} if pairs else {}
        return found

    def load_changed(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the values that `changed` returned, unless this spec has another first value.

        So a schedule continues, and a specification with another rate begins with that rate.  Other
        options are the specification's, also where a scheduler that was made since has set them.
        """
        for group, first in self._each():
            pairs = saved.get(group["name"], {}).items()
            put(group, first | {k: now for k, (was, now) in pairs if first.get(k) == was})


def options(group: Options) -> dict[str, Any]:
    """The options of a group that say what it computes, as JSON holds them."""
    found = {k: _listed(value) for k, value in group.items() if k not in (*NAMING, *_HOW)}
    return {key: value for key, value in found.items() if _all_are(value, int | float | str | None)}


def put(group: dict[str, Any], saved: Options) -> None:
    for key, value in saved.items():
        group[key] = _filled(group.get(key), tuple(value) if isinstance(value, list) else value)


def _filled(old: Any, value: Any) -> Any:
    if isinstance(old, Tensor):
        return old.fill_(value)
    if isinstance(old, tuple) and isinstance(value, tuple) and len(old) == len(value):
        return tuple(map(_filled, old, value))
    return value


def compared(group: Options, called: str) -> dict[str, Any]:
    """The options that must be equal on all data ranks, each by its name and `called`.

    Tensors on a GPU are left out: to read them would wait for it.
    """
    on_host = {k: v for k, v in group.items() if not (isinstance(v, Tensor) and v.is_cuda)}
    values = options(on_host).items()
    return {f"{key} of {called}": v for key, v in values if not isinstance(v, str | None)}


def fits(value: Any, first: Any) -> bool:
    """Whether an option may take the place of its first value: a number that of a number, ..."""
    if isinstance(first, bool):
        return isinstance(value, bool)
    if isinstance(first, tuple | list):
        as_many = isinstance(value, tuple | list) and len(value) == len(first)
        return as_many and all(map(fits, value, first))
    return not _is_number(first) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Not NaN; also a tensor with one, which is not read on a GPU: that would wait."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and (value.is_cuda or not value.isnan())
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def require_options(group: Options, first: Options, called: str) -> None:
    """Raise InputError for an option of another kind than its first value, or a rate below 0."""
    require_rate(group["lr"], f" in {called}")
    for key in (key for key, value in first.items() if not fits(group.get(key), value)):
        raise bad(
            f"{key}={short_repr(group.get(key))} in {called}",
            f"a value of the kind of {key}={first[key]!r}, the first one",
            f"group[{key!r}] = {first[key]!r}, for the group in engine.optimizer.param_groups",
        )


def require_rate(lr: Any, given: str) -> None:
    """Raise InputError for a learning rate that is no finite number of at least 0."""
    on_gpu = isinstance(lr, Tensor) and lr.is_cuda
    if not (_is_number(lr) and (on_gpu or 0 <= lr < math.inf)):
        raise bad(
            f"a learning rate of {lr!r}{given}",
            "a finite number, 0 or more",
            "engine.set_lr(3e-4), or a scheduler whose rates are finite",
        )


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_listed(x) for x in value] if isinstance(value, tuple | list) else value


def _all_are(value: Any, kinds: Any) -> bool:
    if isinstance(value, list):
        return all(_all_are(x, kinds) for x in value)
    return isinstance(value, kinds)
