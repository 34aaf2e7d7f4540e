"""The model of a run, built for its plan; its batches and learning rates."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.device_room import AUTO, explained, ran_out, with_offload
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer_spec import Adafactor, AdamW, Lion, Muon, OptimizerSpec
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.engine.predict import Predictor, predict_with
from shardwise.models import decoder, gpt
from shardwise.models.decoder import Sizes
from shardwise.models.trainable import without_decay
from shardwise.observe.dry_twin import DryTwin
from shardwise.observe.work import kernels_of
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.tensor.tensor_table import Table
from shardwise.train.config import Config
from shardwise.train.config_sections import TrainSection
from shardwise.train.data.data import Rows, padded
from shardwise.train.prepare import PreparedRun
from shardwise.train.sizes import on_meta

Batch = dict[str, Tensor]


def build(prepared: PreparedRun, world: World) -> Engine:
    """The engine. Its first weights depend only on the seed, or the folder."""
    try:
        return _build_engine(prepared, world)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError on a CPU
        if not ran_out(error):
            raise
        what = f"for its part of a model of {decoder.parameters(prepared.sizes):,} parameters"
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
    tokens = torch.zeros(rows, prepared.sizes.sequence, dtype=torch.int64)
    return {"inputs": tokens, "targets": tokens}


def predictor(
    prepared: PreparedRun, share: Batch, device: torch.device
) -> Callable[[Plan], Prediction]:
    """Predictions of the run under other plans, for a rank with the part `share` of the batch."""
    model = on_meta(prepared.sizes)
    return lambda plan: predict_with(model, plan, share, _options(prepared, device))


def prediction_of(prepared: PreparedRun, engine: Engine, share: Batch) -> Prediction:
    model, options, at = on_meta(prepared.sizes), _as_built(prepared, engine), engine.world
    return Predictor(model, prepared.plan, options, rank=at.rank, ranks=at.size).of(share)


def dry_twin(prepared: PreparedRun, engine: Engine) -> DryTwin:
    options = _as_built(prepared, engine)
    return DryTwin(on_meta(prepared.sizes), engine.plan, options, engine.world.rank)


def _as_built(prepared: PreparedRun, engine: Engine) -> EngineOptions:
    stages = engine.staging.begins if engine.staging else None
    return replace(_options(prepared, engine.world.device), stages=stages)


def optimizer_of(train: TrainSection, model: nn.Module) -> OptimizerSpec:
    """The optimizer that [train] names, without weight decay for norms and biases (vectors). Muon
    is scaled so that AdamW's rates fit.
    """
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
        loss=decoder.loss_of(sizes),
        # an infinite bound does not clip, but the norm is computed, and recorded
        clip=train.clip or float("inf"),
        table=table,
        on_nonfinite=train.on_nonfinite,
        check_every=config.run.check_every,
    )


def _build_engine(prepared: PreparedRun, world: World) -> Engine:
    train = prepared.config.train
    if prepared.table is not None and prepared.config.plan.table is None and world.rank == 0:
        print(
            f"shardwise: the table of tensor parallelism is derived; 'shardwise table "
            f"{prepared.config.model.name}' prints it (docs/how-to/tables.md)",
            file=sys.stderr,
        )
    model = on_meta(prepared.sizes)
    options = replace(
        _options(prepared, world.device),
        tokens=gpt.tokens,
        fill=decoder.fill(prepared.sizes, train.seed),
        offload_folder=prepared.config.offload.folder,
    )
    return build_engine(model, prepared.plan, world, options)


def batch(rows: Rows, least: int, device: torch.device) -> Batch:
    """The rows as tensors, padded to at least `least` rows with rows without targets."""
    filled = padded(rows, least)
    return {
        "inputs": torch.from_numpy(filled.inputs).to(device),
        "targets": torch.from_numpy(filled.targets).to(device),
    }


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
