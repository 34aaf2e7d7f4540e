"""The sizes of a run's model, and the check that it fits the plan."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.derive.table import table_or_derived
from shardwise.models import hf, moe, pretrained, user
from shardwise.models.decoder import Sizes, build, loss_of
from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.models.pretrained import PUBLISHED
from shardwise.models.registry import NAMED, named_sizes, nearest
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.tensor_table import Table
from shardwise.train.config_sections import ModelSection
from shardwise.verify.inputs import table_in

TABLE_ROWS: Final = 2  # of the batch from which a table is derived
_DEFAULT: Final = ModelSection().model_dump()
#: Keys that only layers of experts read.
OF_EXPERTS: Final = ("gate", "experts_per_token")


def model_sizes(
    section: ModelSection, vocabulary: int, seed: int = 0, *, weights: bool = True
) -> Sizes:
    """The named sizes with the tokenizer's vocabulary, overridden by the keys of the section.
    Published sizes have their own vocabulary. `hf:./FOLDER` and `file.py:build` have all of their
    own, except the length of a training sequence; without `weights` a folder may have a
    configuration alone. `seed` is the seed of a user's weights and of the gates' random numbers.
    """
    if section.name.startswith(pretrained.PREFIX):
        return _in_folder(section, weights=weights)
    if ".py" in section.name:
        return _of_user(section, vocabulary, seed)
    named = named_sizes(section.name)
    if named is None:
        allowed = f"{', '.join(NAMED)}, hf:./FOLDER or file.py:build"
        raise bad(
            f"model.name = '{section.name}'", allowed, f"model.name = '{nearest(section.name)}'"
        )
    given = {f.name: getattr(section, f.name) for f in fields(GPTConfig)}
    sizes: dict[str, Any] = {} if section.name in PUBLISHED else {"vocabulary": vocabulary}
    sizes |= {name: value for name, value in given.items() if value is not None}
    if "heads" in sizes and "kv_heads" not in sizes:
        sizes["kv_heads"] = sizes["heads"]
    dense = replace(named.gpt if isinstance(named, MoEConfig) else named, **sizes)
    of_experts = [name for name in OF_EXPERTS if getattr(section, name) != _DEFAULT[name]]
    if isinstance(named, MoEConfig):
        _refuse_keys(section, ["experts"] * (section.experts is not None) + of_experts)
        return _trained_on_text(replace(named, gpt=dense, seed=seed))
    if section.experts is not None:
        name, _, capacity = section.gate.partition(":")
        gate = f"{name}:{capacity}:{section.experts}:{section.experts_per_token or ''}"
        return _trained_on_text(replace(moe.tiny(gate), gpt=dense, shared=0, seed=seed))
    if of_experts:
        key, value = of_experts[0], getattr(section, of_experts[0])
        text = f"'{value}'" if isinstance(value, str) else value
        raise bad(
            f"model.{key} = {text} without model.experts, which trains a dense model",
            "the number of experts beside it, or none of the keys of experts",
            f"model.experts = 8, or leave model.{key} out",
        )
    return dense


def _in_folder(section: ModelSection, *, weights: bool) -> Sizes:
    folder = section.name.removeprefix(pretrained.PREFIX)
    if not hf.is_folder(folder):
        raise bad(
            f"model.name = '{section.name}'",
            "hf: and the path of a folder with weights, in which there is a slash",
            f"model.name = 'hf:./{folder or 'model'}'",
        )
    _refuse_sizes(section)
    return pretrained.read(Path(folder), section.sequence, weights=weights)


def _of_user(section: ModelSection, vocabulary: int, seed: int) -> Sizes:
    _refuse_sizes(section)
    if section.sequence is None:
        raise bad(
            f"model.name = '{section.name}' without model.sequence",
            "the positions of a training sequence beside a model of a file",
            "model.sequence = 128",
        )
    return user.read(section.name, section.sequence, vocabulary, seed)


def _refuse_sizes(section: ModelSection) -> None:
    given = section.model_fields_set - {"name", "sequence"}
    _refuse_keys(
        section, sorted(name for name in given if getattr(section, name) != _DEFAULT[name])
    )


def _refuse_keys(section: ModelSection, own: list[str]) -> None:
    if own:
        raise bad(
            f"model.{own[0]} with model.name = '{section.name}'",
            "model.sequence, for example; this size is the model's own",
            f"leave model.{own[0]} out",
        )


def _trained_on_text(sizes: MoEConfig) -> MoEConfig:
    """Raises InputError for a gate that reads numbers which no text has."""
    if sizes.gate.name == "assigned":
        raise bad(
            f"model.gate = '{sizes.gate.name}' in a run on text, which does not assign tokens to "
            "experts",
            "a gate that reads logits or token ids",
            "model.gate = 'hash'",
        )
    return sizes


def on_meta(sizes: Sizes) -> nn.Module:
    with torch.device("meta"):
        return build(sizes)


def run_table(file: str | None, sizes: Sizes, plan: Plan) -> Table | Mapping[str, str] | None:
    """The table in the file `plan.table`, or a derived one for a model without its own."""
    given = None if file is None else table_in(Path(file), "plan.table =")
    # on meta: the sequence is not yet known to fit the data or this machine
    tokens = torch.zeros(TABLE_ROWS, sizes.sequence, dtype=torch.int64, device="meta")
    batch = {"inputs": tokens, "targets": tokens}
    return table_or_derived(given, plan, lambda: on_meta(sizes), lambda: batch, loss_of(sizes))


def require_fit(sizes: Sizes, plan: Plan, table: Table | Mapping[str, str] | None) -> None:
    """Raise InputError if the plan has more tensor ranks than the model has heads or tokens."""
    model = on_meta(_one_layer(sizes))
    tensor_parallel.table_for(model, plan, table)
    expert_parallel.check_experts(model, plan)


def _one_layer(sizes: Sizes) -> Sizes:
    """The sizes with a single layer; a model from a folder keeps all its layers."""
    if isinstance(sizes, GPTConfig):
        return replace(sizes, layers=1)
    if isinstance(sizes, MoEConfig):
        return replace(sizes, gpt=replace(sizes.gpt, layers=1))
    return sizes
