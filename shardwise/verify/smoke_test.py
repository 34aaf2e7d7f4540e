"""The smoke test: one training step in this process, where a model fails once, not on all ranks."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm.world import alone
from shardwise.core.errors import InputError, bad
from shardwise.core.plan.plan import Plan
from shardwise.derive.table import table_or_derived
from shardwise.engine.checks.device_room import require_room
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.models.user import place_of
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.data.wrap_policy import choose
from shardwise.techniques.expert.apply import experts_in
from shardwise.techniques.pipeline import stage_module, weight_stashing
from shardwise.techniques.recompute import apply as recomputation
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.verify.inputs import Options, without_dropout
from shardwise.verify.oracles.batches import ROWS, ROWS_16, SEED
from shardwise.verify.parity import alone_of, build_options, clip_of, engine_of

TENSORS = 4  # of the size of a parameter, on one process: it, its gradient, two states of AdamW


def smoke_test(
    model: str | Trainable, plan: Plan, options: Options | None = None
) -> tuple[nn.Module, Options]:
    """Train `model` for one step in the plan's precision; returns it, and the options to prove."""
    found, options = _trained(model, plan), with_table(model, plan, options or Options())
    choose(found, options.units)
    tensor_parallel.table_for(found, plan, options.table)
    starts = stage_module.stage_starts(found, plan, None, stage_module.calls_under(plan, found))
    kinds = recomputation.recomputed_modules(found, plan, options.units, starts)
    recomputation.on_host(found, plan, options.units, kinds, starts)
    weight_stashing.require(found, plan, starts, EngineOptions())
    return found, options


def with_table(model: str | Trainable, plan: Plan, options: Options) -> Options:
    """The options with a derived table, if the plan needs one and there is none."""
    own = find(model)
    batch = partial(own.batch, ROWS, SEED)
    return replace(options, table=table_or_derived(options.table, plan, own.plain, batch, own.loss))


def _trained(model: str | Trainable, plan: Plan) -> nn.Module:
    trainable = find(model)
    trainable.require_memory(TENSORS * (8 if plan.precision == "fp64" else 4))
    _require_seeded(trainable)
    if plan.precision in ("bf16", "fp16") and experts_in(trainable.plain()):
        raise bad(
            f"a proof in {plan.precision} of a mixture of experts: rounding sends tokens of "
            "nearly equal scores to other experts than in one process",
            "fp64 or fp32 for models with experts",
            f"'{replace(plan, precision='fp64')}'",
        )
    name = trainable.name
    if isinstance(model, str) and model.partition(":")[0] == "gpt":  # ours; a step may take long
        return trainable.build()
    plain, precision = Plan(precision=plan.precision), plan.precision
    try:
        engine = engine_of(trainable, plain, alone())
        engine.step(trainable.batch(ROWS, SEED))
        if precision in ("bf16", "fp16"):
            precision = "fp64, with which 16 bits are compared,"
            clip_of(alone_of(trainable, plain, engine.world.device), trainable, engine.world.device)
    except InputError:
        raise
    except Exception as error:
        raise bad(
            f'the model "{name}", whose step in {precision} on one process gives '
            f"{type(error).__name__}: {' '.join(str(error).split())} ({place_of(error, name)})",
            "a model that trains on its own batches, in the precision of the plan",
            "the same command, once it does: a mixture of transformers with "
            'experts_implementation="eager"; fp32 in the plan if the model fixes its dtypes',
        ) from error
    return engine.model


def _require_seeded(trainable: Trainable) -> None:
    """Raise InputError for batches that differ between two calls, since each rank makes its own."""
    one, other = (pytree.tree_leaves(trainable.batch(ROWS, SEED)) for _ in range(2))
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if isinstance(a, Tensor)]
    same = (torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    if len(one) != len(other) or not all(same):
        raise bad(
            f'make_batch of the model "{trainable.name}", which ignores its seed: two calls with '
            "the same rows and seed return different batches",
            "batches that depend only on rows and seed, because each rank makes its own",
            "torch.randn(rows, ..., generator=torch.Generator().manual_seed(seed))",
        )


def require_bound(model: str | Trainable, plan: Plan, options: Options) -> None:
    """Raise InputError if steps of a proof of `plan` on `model` exceed its bound, by prediction."""
    require_room(plan, partial(_predicted, model, options))


def _predicted(model: str | Trainable, options: Options, plan: Plan) -> Prediction:
    """For the largest batch of the first rank."""
    trainable = without_dropout(find(model))
    fewest = ROWS_16 if plan.precision in ("bf16", "fp16") else ROWS
    rows = plan.microbatches * max(ROWS, fewest // plan.microbatches)
    plain = trainable.plain()
    chosen = build_options(trainable, plan, options, plain)
    return Predictor(plain, plan, chosen, ranks=plan.size).of(trainable.batch(rows, SEED))
