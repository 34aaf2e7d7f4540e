"""`state_dict()` and `load_state_dict` of a sharded module: full tensors, on all ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.errors import bad
from shardwise.techniques.data.checksum import bits_sum
from shardwise.techniques.data.flat.flat_parameter import Flat, State
from shardwise.techniques.data.unit_hooks import Data


def keep_keys(module: nn.Module, data: Data, flats: Sequence[Flat]) -> list[RemovableHandle]:
    """Make `module.state_dict()` return full tensors and `load_state_dict` accept them; handles
    undo it.

    If parameters are sharded, both are collective: all ranks call them.
    """
    if not any(flat.split for flat in flats):  # p is whole between steps
        return []
    handles = [
        module.register_state_dict_pre_hook(partial(_gather_all, data, flats)),
        module.register_state_dict_post_hook(partial(_copy_whole, data)),
        module.register_load_state_dict_pre_hook(partial(_gather_all, data, flats)),
        module.register_load_state_dict_post_hook(partial(_after_load, data, flats)),
    ]
    places = {id(p): flat for flat in flats if flat.split for p in flat.params}
    for name, part in module.named_modules():
        split = [places[id(p)] for p in part._parameters.values() if id(p) in places]
        if name and split:
            refuse = partial(_require_gathered, name, split)
            handles.append(part.register_state_dict_pre_hook(refuse))
            handles.append(part.register_load_state_dict_pre_hook(refuse))
    return handles


def _require_gathered(name: str, flats: Sequence[Flat], *_: Any) -> None:
    """Raise InputError for the state dict of a part: the hooks of the whole module gather."""
    if any(flat.state is not State.UNSHARDED for flat in flats):
        raise bad(
            f"state_dict or load_state_dict of {name}, a part of a sharded module",
            "that of the whole module, on all ranks; of a part before the wrapping",
            f'{{k: v for k, v in module.state_dict().items() if k.startswith("{name}.")}}, and '
            "module.load_state_dict(state, strict=False)",
        )


def _gather_all(data: Data, flats: Sequence[Flat], *_: Any) -> None:
    data.between_passes()
    data.units.to_sharded()  # also what was open for reads
    for flat in flats:
        flat.unshard_in_own_dtype()


@torch.no_grad()
def _copy_whole(data: Data, _: nn.Module, state: dict[str, Any], *_more: Any) -> None:
    for key, value in list(state.items()):
        if isinstance(value, Tensor):
            state[key] = value.detach().clone()
    data.units.to_sharded()


@torch.no_grad()
def _after_load(data: Data, flats: Sequence[Flat], *_: Any) -> None:
    whole = [f.full if f.full_in_own_dtype is None else f.full_in_own_dtype for f in flats]
    loaded = sum(int(bits_sum(x)) for x in whole) % data.consensus.same.hashes
    data.consensus.same.facts["the checksum of the weights of load_state_dict"] = loaded
    for flat in flats:
        flat.keep_block()
    data.units.to_sharded()
