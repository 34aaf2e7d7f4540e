"""The sizes of a run's GPT, and whether its plan and this machine have room for it."""

import os
from dataclasses import replace
from typing import Any, Final

import torch

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.suggest import suggest
from shardwise.core.zero import STATE_BYTES, bytes_per_parameter, row_of
from shardwise.engine import tensor_parallel
from shardwise.models import gpt
from shardwise.models.gpt import GPT, SIZES, GPTConfig
from shardwise.train.config import ModelSection
from shardwise.train.progress import size_text

LAYER_BYTES: Final = 2**14  # at least, of the modules of a layer without weights, in each process
GPU_BYTES: Final = 2**39  # no GPU has more


def gpt_config(section: ModelSection, vocabulary: int) -> GPTConfig:
    """The sizes: the named ones, the tokens' own vocabulary, and over them what is given."""
    if section.name not in SIZES:
        close = suggest(section.name, SIZES)
        raise bad(f"model.name = '{section.name}'", ", ".join(SIZES), f"model.name = '{close}'")
    given: dict[str, Any] = {"vocabulary": vocabulary, **section.sizes()}
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    return replace(SIZES[section.name], **given)


def state_bytes(sizes: GPTConfig, plan: Plan) -> int:
    """What all ranks of the plan hold between steps, at least: weights, gradients, Adam's state.

    Padding, what tensor ranks hold in common and activations come on top.
    """
    shard = plan.mesh.size_of(plan.shard_axis or "none")
    each = bytes_per_parameter(row_of(plan.row), shard, *STATE_BYTES[plan.precision or "fp32"])
    # tensor ranks and stages share out the parameters, data ranks have each part once more
    return int(gpt.parameters(sizes) * each * plan.data_size)


def machine_bytes(device: str) -> int:
    """No less than the memory of this machine and, for a run that may use them, of its GPUs."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # their number is known without waking them up, their memory is not
    return here + (0 if device == "cpu" else torch.cuda.device_count() * GPU_BYTES)


def require_memory(sizes: GPTConfig, plan: Plan, there_bytes: int, share: float = 1.0) -> None:
    """Raise InputError for a model whose state has no room, however well it is laid out.

    `share` is the part of the plan's ranks that this machine, with so much memory, has.
    """
    needed = (state_bytes(sizes, plan) + plan.size * sizes.layers * LAYER_BYTES) * share
    if needed > there_bytes:
        raise bad(
            f"a model of {gpt.parameters(sizes):,} parameters (model.layers = {sizes.layers}, "
            f"model.width = {sizes.width}, model.hidden = {sizes.hidden}, model.vocabulary = "
            f"{sizes.vocabulary}) under the plan '{plan}', which keeps {size_text(needed)} of "
            "weights, gradients, optimizer state and modules on this machine, which has "
            f"{size_text(there_bytes)} of memory",
            "a model whose state fits, with room for its activations",
            "smaller model.layers, model.width or model.hidden, such as model.name = 'quickstart' "
            "alone; or a plan that shards more over more machines",
        )


def require_fit(sizes: GPTConfig, plan: Plan) -> None:
    """Raise InputError for a plan that has more tensor ranks than the model has heads, or words."""
    with torch.device("meta"):
        tensor_parallel.fitting(GPT(replace(sizes, layers=1)), plan, None)
