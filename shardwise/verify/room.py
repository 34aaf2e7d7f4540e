"""Whether the steps of a proof fit `device_memory`, by prediction, before they begin."""

from functools import partial

from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.device_room import require_room
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.prediction.prediction import Prediction
from shardwise.verify.not_comparable import without_dropout
from shardwise.verify.oracles.batches import ROWS, ROWS_16, SEED
from shardwise.verify.parity import theory_of
from shardwise.verify.proof_options import Options


def require_bound(model: str | Trainable, plan: Plan, options: Options) -> None:
    """Raise InputError if steps of a proof of `plan` on `model` exceed its bound, by prediction."""
    require_room(plan, partial(_predicted, model, options))


def _predicted(model: str | Trainable, options: Options, plan: Plan) -> Prediction:
    """The prediction for the largest batch of the first rank."""
    trainable = without_dropout(find(model))
    fewest = ROWS_16 if plan.precision in ("bf16", "fp16") else ROWS
    rows = plan.microbatches * max(ROWS, fewest // plan.microbatches)
    batch = trainable.batch(rows, SEED)
    return theory_of(trainable, plan, 0, options=options)(batch)
