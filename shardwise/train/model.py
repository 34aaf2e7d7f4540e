"""The model of a run: its sizes, built for its plan; its batches and learning rates."""

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.hub import folder_of
from shardwise.derive.table import table_or_derived
from shardwise.engine.checks.device_room import AUTO, explained, ran_out, with_offload
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer_spec import Adafactor, AdamW, Lion, Muon, OptimizerSpec
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.engine.predict import predict_rank, predict_with
from shardwise.models import gpt, moe, pretrained, user
from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.models.pretrained import PUBLISHED, Adapters
from shardwise.models.registry import NAMED, Sizes, named_sizes, nearest
from shardwise.models.trainable import without_decay
from shardwise.observe.dry_twin import DryTwin
from shardwise.observe.work import kernels_of
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.train.config import Config
from shardwise.train.config_sections import ModelSection, TrainSection
from shardwise.train.data.data import Rows, padded
from shardwise.train.prepare import PreparedRun
from shardwise.verify.inputs import table_in
from shardwise.wrap.wrap_policy import blocks

Batch = dict[str, Tensor]


def build(prepared: PreparedRun, world: World) -> Engine:
    """The engine. Its first weights depend only on the seed, or the folder."""
    if prepared.table is not None and prepared.config.plan.table is None and world.rank == 0:
        print(
            f"shardwise: the table of tensor parallelism is derived; 'shardwise table "
            f"{prepared.config.model.name}' prints it (docs/how-to/tables.md)",
            file=sys.stderr,
        )
    options = replace(
        _options(prepared, world.device),
        tokens=gpt.tokens,
        fill=prepared.sizes.fill(prepared.config.train.seed),
        offload_folder=prepared.config.offload.folder,
    )
    model = on_meta(prepared.sizes)
    for block in blocks(model).values() if prepared.config.train.compile else ():
        block.compile()
    try:
        return build_engine(model, prepared.plan, world, options)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError on a CPU
        if not ran_out(error):
            raise
        what = f"for its part of a model of {prepared.sizes.parameters:,} parameters"
        raise explained(error, what, prepared.plan, world.rank) from error


def with_least_offload(prepared: PreparedRun, world: World) -> PreparedRun:
    """Replace `offload:auto` by the least offload that fits, by the prediction for rank 0."""
    plan = prepared.plan
    if plan.offload != AUTO:
        return prepared
    predict_plan = predictor(prepared, largest_share(prepared), world.device)
    return replace(prepared, plan=with_offload(plan, predict_plan, world.device))


def largest_share(prepared: PreparedRun) -> Batch:
    """A batch with as many rows as the first data rank has in a step; no rank has more. Not on
    meta, since a pipeline would take such a batch for an activation of no layer.
    """
    rows = -(-prepared.config.train.batch // prepared.plan.shares)
    tokens = np.zeros((rows, prepared.sizes.sequence), np.int64)
    documents = tokens if prepared.config.data.documents else None
    by_ids = prepared.config.model.name.startswith(pretrained.PREFIX)
    return batch(Rows(tokens, tokens, documents), 0, torch.device("cpu"), by_ids=by_ids)


def predictor(
    prepared: PreparedRun, share: Batch, device: torch.device
) -> Callable[[Plan], Prediction]:
    """Predictions of the run under other plans, for a rank with the part `share` of the batch."""
    model = on_meta(prepared.sizes)
    return lambda plan: predict_with(model, plan, share, _options(prepared, device))


def prediction_of(prepared: PreparedRun, engine: Engine, share: Batch) -> Prediction:
    model, options, at = on_meta(prepared.sizes), _as_built(prepared, engine), engine.world
    return predict_rank(model, prepared.plan, share, options, rank=at.rank, ranks=at.size)


def dry_twin(prepared: PreparedRun, engine: Engine) -> DryTwin:
    options = _as_built(prepared, engine)
    return DryTwin(on_meta(prepared.sizes), engine.plan, options, engine.world.rank)


def _as_built(prepared: PreparedRun, engine: Engine) -> EngineOptions:
    stages = engine.staging.begins if engine.staging else None
    return replace(_options(prepared, engine.world.device), stages=stages)


def optimizer_of(train: TrainSection, model: nn.Module) -> OptimizerSpec:
    """The optimizer that [train] names, without weight decay for vectors."""
    decayed = {n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1}
    options: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
    groups = without_decay(model, decayed)
    if train.optimizer == "adafactor":
        return Adafactor(groups, **options)
    adamw = partial(AdamW, lr=train.lr, betas=train.betas)
    if train.optimizer == "muon":
        vectors = dict.fromkeys(groups, adamw(weight_decay=0.0))
        rest = adamw(weight_decay=train.weight_decay)
        return Muon(vectors, **options, rest=rest, adjust_lr_fn="match_rms_adamw")
    return (Lion if train.optimizer == "lion" else AdamW)(groups, **options, betas=train.betas)


def _options(prepared: PreparedRun, device: torch.device) -> EngineOptions:
    options = options_of_run(prepared.config, prepared.sizes, prepared.table)
    return replace(options, kernels=kernels_of(device))


def options_of_run(
    config: Config, sizes: Sizes, table: Table | Mapping[str, str] | None
) -> EngineOptions:
    """The options of the engine."""
    train = config.train
    return EngineOptions(
        optimizer=optimizer_of(train, on_meta(sizes)),
        # not a number for a part without targets, which has weight zero
        loss=sizes.loss,
        # an infinite bound does not clip, but the norm is computed, and recorded
        clip=train.clip or float("inf"),
        table=table,
        on_nonfinite=train.on_nonfinite,
        check_every=config.run.check_every,
    )


def batch(rows: Rows, least: int, device: torch.device, *, by_ids: bool = False) -> Batch:
    """The rows as tensors, padded to at least `least` rows with rows without targets. Documents are
    kept apart by a mask, or by positions in a model of transformers (`by_ids`).
    """
    filled = padded(rows, least)
    arrays = {"inputs": filled.inputs, "targets": filled.targets}
    apart = filled.positions if by_ids else filled.mask
    arrays |= {} if apart is None else {"position_ids" if by_ids else "attention_mask": apart}
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":  # so that the host does not wait for the copy
        found = {name: x.pin_memory() for name, x in found.items()}
    return {name: x.to(device, non_blocking=True) for name, x in found.items()}


#: The part of the steps after warmup in which `wsd` decays (arXiv 2404.06395, section 4).
WSD_DECAY: Final = 0.2


def learning_rate(step: int, train: TrainSection) -> float:
    r"""The rate of step `step`, counted from 0; the last one's is `min_lr_ratio * lr`.

        lr |   /‾‾\
           |  /    ‾\
           | /       ‾‾\__ min_lr_ratio * lr
           +---+-----------+--- step
             warmup      steps

    A function of the step alone, so that a resumed run continues the same curve.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    if train.decay == "constant":
        return train.lr
    span = max(1, train.steps - 1 - train.warmup)
    done = min(1.0, (step - train.warmup) / span)
    if train.decay == "wsd":
        done = max(0.0, 1 - (1 - done) / WSD_DECAY)
    left = (1 + math.cos(math.pi * done)) / 2 if train.decay == "cosine" else 1 - done
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)


# --- the sizes of the model, and whether it fits the plan -----------------------------------------

TABLE_ROWS: Final = 2  # of the batch from which a table is derived
_DEFAULT: Final = ModelSection().model_dump()
#: Keys that only layers of experts read.
OF_EXPERTS: Final = ("gate", "experts_per_token")
#: Keys of adapters beside a model `hf:./FOLDER`.
OF_ADAPTERS: Final = ("lora_rank", "lora_alpha", "lora_targets")


def model_sizes(
    section: ModelSection, vocabulary: int, seed: int = 0, *, weights: bool = True
) -> Sizes:
    """The named sizes with the tokenizer's vocabulary, overridden by the keys of the section.
    Published sizes have their own vocabulary. `hf:./FOLDER` and `file.py:build` have all of their
    own, except the length of a training sequence; without `weights` a folder may have a
    configuration alone. `seed` is the seed of a user's weights and of the gates' random numbers.
    """
    name, sequence = section.name, section.sequence
    changed = [key for key, value in _DEFAULT.items() if getattr(section, key) != value]
    of_experts = [key for key in changed if key in OF_EXPERTS]
    if name.startswith(pretrained.PREFIX):
        _refuse(section, set(changed) - {"name", "sequence", *OF_ADAPTERS})
        folder = folder_of(name.removeprefix(pretrained.PREFIX), weights=weights)
        return pretrained.read(folder, sequence, adapters_of(section), weights=weights)
    if ".py" in name:
        _refuse(section, set(changed) - {"name", "sequence"})
        if sequence is not None:
            return user.read(name, sequence, vocabulary, seed)
        allowed = "the positions of a training sequence beside a model of a file"
        raise bad(f"model.name = '{name}' without model.sequence", allowed, "model.sequence = 128")
    of_adapters = {key for key in changed if key in OF_ADAPTERS}
    _refuse(section, of_adapters, "adapters beside a model hf:./FOLDER, whose weights are trained")
    named = named_sizes(name)
    if named is None:
        allowed = f"{', '.join(NAMED)}, hf:./FOLDER or file.py:build"
        raise bad(f"model.name = '{name}'", allowed, f"model.name = '{nearest(name)}'")
    given = {f.name: getattr(section, f.name) for f in fields(GPTConfig)}
    sizes: dict[str, Any] = {} if name in PUBLISHED else {"vocabulary": vocabulary}
    sizes |= {key: value for key, value in given.items() if value is not None}
    if "heads" in sizes and "kv_heads" not in sizes:
        sizes["kv_heads"] = sizes["heads"]
    dense = replace(named.gpt if isinstance(named, MoEConfig) else named, **sizes)
    if isinstance(named, MoEConfig):
        _refuse(section, {key for key in changed if key in ("experts", *OF_EXPERTS)})
        return _trained_on_text(replace(named, gpt=dense, seed=seed))
    if section.experts is not None:
        gate, _, capacity = section.gate.partition(":")
        text = f"{gate}:{capacity}:{section.experts}:{section.experts_per_token or ''}"
        return _trained_on_text(replace(moe.tiny(text), gpt=dense, shared=0, seed=seed))
    if of_experts:
        key = of_experts[0]
        raise bad(
            f"model.{key} = {getattr(section, key)!r} without model.experts",
            "the number of experts beside it, or none of the keys of experts",
            f"model.experts = 8, or leave model.{key} out",
        )
    return dense


def adapters_of(section: ModelSection) -> Adapters | None:
    """Raises InputError for the other keys of adapters without a rank."""
    if section.lora_rank is None:
        keys = [key for key in OF_ADAPTERS if getattr(section, key)]
        _refuse(section, keys, "model.lora_rank beside it")
        return None
    alpha = section.lora_alpha or 2.0 * section.lora_rank
    return Adapters(section.lora_rank, alpha, section.lora_targets)


def _refuse(
    section: ModelSection,
    keys: Collection[str],
    allowed: str = "model.sequence, for example; this size is the model's own",
) -> None:
    if keys:
        raise bad(
            f"model.{min(keys)} with model.name = '{section.name}'",
            allowed,
            f"leave model.{min(keys)} out",
        )


def _trained_on_text(sizes: MoEConfig) -> MoEConfig:
    """Raises InputError for a gate that reads numbers which no text has."""
    if sizes.gate.name == "assigned":
        raise bad(
            f"model.gate = '{sizes.gate.name}' in a run on text, which assigns no experts",
            "a gate that reads logits or token ids",
            "model.gate = 'hash'",
        )
    return sizes


def on_meta(sizes: Sizes) -> nn.Module:
    with torch.device("meta"):
        return sizes.build()


def run_table(file: str | None, sizes: Sizes, plan: Plan) -> Table | Mapping[str, str] | None:
    """The table in the file `plan.table`, or a derived one for a model without its own."""
    given = None if file is None else table_in(Path(file), "plan.table =")
    # on meta: the sequence is not yet known to fit the data or this machine
    tokens = torch.zeros(TABLE_ROWS, sizes.sequence, dtype=torch.int64, device="meta")
    batch = {"inputs": tokens, "targets": tokens}
    return table_or_derived(given, plan, lambda: on_meta(sizes), lambda: batch, sizes.loss)


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
