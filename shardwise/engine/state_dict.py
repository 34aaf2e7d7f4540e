"""Hooks that make a wrapped module's state_dict give and take full tensors."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.hooks import Data


def keep_keys(module: nn.Module, data: Data, flats: Sequence[Flat]) -> list[RemovableHandle]:
    """Make `module.state_dict()` return full tensors and `load_state_dict` accept them.

    If parameters are sharded, both are collective: all ranks call them.  Removing the returned
    handles undoes this.
    """
    if not any(flat.split for flat in flats):  # p is whole between steps
        return []
    return [
        module.register_state_dict_pre_hook(partial(_before_save, data, flats)),
        module.register_state_dict_post_hook(partial(_copy_whole, data)),
        module.register_load_state_dict_pre_hook(partial(_gather_all, data, flats)),
        module.register_load_state_dict_post_hook(partial(_after_load, data, flats)),
    ]


def _before_save(data: Data, flats: Sequence[Flat], *_: Any) -> None:
    data.consensus.check()
    _gather_all(data, flats)


def _gather_all(data: Data, flats: Sequence[Flat], *_: Any) -> None:
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
    for flat in flats:
        flat.keep_block()
    data.units.to_sharded()


def full_parameters(flats: Sequence[Flat]) -> dict[str, Tensor]:
    """Every full parameter by name, as new tensors; gathers one flat parameter at a time."""
    found: dict[str, Tensor] = {}
    for flat in flats:
        was_sharded = flat.is_sharded
        flat.unshard()
        for name, p in zip(flat.names, flat.params, strict=True):
            tiles = [found[name]] if name in found else []  # of its rows, in their order
            found[name] = torch.cat([*tiles, p.detach()]) if tiles else p.detach().clone()
        if was_sharded:
            flat.reshard()
            flat.to_sharded()
    return found
