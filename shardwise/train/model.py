"""The model of a run: a GPT of the configured sizes, built for its plan, and its batches."""

from functools import partial

import torch
from torch import Tensor

from shardwise.comm.objects import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import RunError, bad
from shardwise.core.suggest import suggest
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer_spec import AdamW
from shardwise.engine.parallelize import parallelize
from shardwise.engine.partition import balance_by_time
from shardwise.engine.stage_module import fitting, schedule_of
from shardwise.models import gpt
from shardwise.models.gpt import GPT
from shardwise.models.initial import initial
from shardwise.train.data import Rows, padded
from shardwise.train.prepare import Prepared
from shardwise.train.progress import size_text
from shardwise.train.sizes import state_bytes

Batch = dict[str, Tensor]


def build(prepared: Prepared, world: World) -> Engine:
    """The engine: a GPT whose weights depend on the seed alone, made unit by unit on its ranks."""
    try:
        return _built(prepared, world)
    except (MemoryError, RuntimeError) as error:  # as torch calls it on a processor
        if isinstance(error, RuntimeError) and "alloc" not in str(error).lower().split("\n")[0]:
            raise
        count, held = gpt.parameters(prepared.sizes), state_bytes(prepared.sizes, prepared.plan)
        raise RunError(
            f"Rank {world.rank} found no memory for its part of a model of {count:,} parameters, "
            f"of whose state the {world.size} rank{'s' * (world.size > 1)} of '{prepared.plan}' "
            f"keep {size_text(held)} ({str(error).splitlines()[0]}). A smaller model, or a plan "
            "that shards over more ranks, may fit."
        ) from error


def _built(prepared: Prepared, world: World) -> Engine:
    train = prepared.config.train
    with torch.device("meta"):
        model = GPT(prepared.sizes)
    return parallelize(
        model,
        prepared.plan,
        world,
        optimizer=AdamW(lr=train.lr, betas=train.betas, weight_decay=train.weight_decay),
        loss=gpt.loss,  # of a part without targets no number; the engine lets it count for nothing
        tokens=gpt.tokens,
        # an infinite bound clips nothing, and still gives the norm, which is recorded
        clip=train.clip or float("inf"),
        on_nonfinite=train.on_nonfinite,
        fill=partial(initial, seed=train.seed),
        stages=starts(prepared, world),
        check_every=prepared.config.run.check_every,
    )


def starts(prepared: Prepared, world: World) -> list[str] | None:
    """The modules that begin the stages but the first; None where parameters are to decide.

    By time: the first rank runs the whole model forward, a microbatch of it, and tells the others.
    """
    given = prepared.config.plan.stages
    if given == "parameters" or (given == "time" and prepared.plan.pipeline is None):
        return None
    with torch.device("meta"):
        model = GPT(prepared.sizes)
    if given != "time":
        return _named(model, given)
    fitting(model, prepared.plan, None)  # what has too few layers takes no time either
    measured = _measured(prepared, world.device) if world.rank == 0 else []
    return all_gather_object(measured, world)[0]


def _named(model: GPT, given: str) -> list[str]:
    """The modules in `plan.stages`. Raises InputError where one is none."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    known = [name for name, _ in model.named_modules() if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        ways = ["parameters", "time", *known]
        near = suggest(unknown[0].lower() if unknown else "", ways)
        raise bad(
            f"plan.stages = '{given}'"
            + (f", of which {unknown[0]} is no module of the model" if names else ""),
            "parameters, time, or the modules that begin the stages but the first, such as "
            + ", ".join(name for name in known if name.count(".") == 1 and name[-1].isdigit()),
            f"plan.stages = '{near}'",
        )
    return names


def _measured(prepared: Prepared, device: torch.device) -> list[str]:
    """Stages whose slowest takes as short as can be on `device`."""
    plan, schedule = prepared.plan, schedule_of(prepared.plan)
    assert schedule is not None
    rows = prepared.config.train.batch // (plan.data_size * plan.microbatches)
    tokens = torch.zeros(rows, prepared.sizes.sequence, dtype=torch.int64, device=device)
    with torch.device(device):
        model = GPT(prepared.sizes)
    return list(balance_by_time(model, lambda whole: whole(tokens), len(schedule.home)))


def batch(rows: Rows, parts: int, device: torch.device) -> Batch:
    """The rows as tensors on the device; at least one row for each of `parts` microbatches."""
    filled = padded(rows, parts)
    return {
        "inputs": torch.from_numpy(filled.inputs).to(device),
        "targets": torch.from_numpy(filled.targets).to(device),
    }
