"""Whether the steps of a proof fit `device_memory`: before they begin, and when one exceeds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from shardwise.core.errors import RankError
from shardwise.core.plan import Plan
from shardwise.engine.device_bound import EXCEEDED
from shardwise.engine.device_room import no_room, require_room
from shardwise.models.registry import find
from shardwise.models.trainable import Trainable
from shardwise.prediction.prediction import Prediction
from shardwise.verify.batches import ROWS, ROWS_16, SEED
from shardwise.verify.limits import without_dropout
from shardwise.verify.options import Options
from shardwise.verify.parity import theory_of


@contextmanager
def within_bound(model: str | Trainable, plan: Plan, options: Options) -> Iterator[None]:
    """Around the steps of a proof of `plan` on `model`.

    Raises InputError if they need more than the plan's bound on device memory: before they begin if
    the prediction exceeds it, or if the bound stopped a rank.
    """
    if plan.device_memory_bytes is None:
        yield
        return
    predict = partial(_predicted, model, options)
    require_room(plan, predict)
    try:
        yield
    except (RankError, torch.OutOfMemoryError) as error:
        if EXCEEDED not in str(error):
            raise
        raise no_room(plan, predict) from None


def _predicted(model: str | Trainable, options: Options, plan: Plan) -> Prediction:
    """The prediction for the largest batch of the first rank."""
    trainable = without_dropout(find(model))
    fewest = ROWS_16 if plan.precision in ("bf16", "fp16") else ROWS
    rows = plan.microbatches * max(ROWS, fewest // plan.microbatches)
    batch = trainable.batch(rows, SEED)
    return theory_of(trainable, plan, 0, options=options)(batch)
