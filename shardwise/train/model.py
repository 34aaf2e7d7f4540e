"""The model of a run: a GPT of the configured sizes, what it is trained on, what it costs."""

import difflib
import os
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm.objects import all_gather_object
from shardwise.comm.world import World
from shardwise.core.errors import RunError, bad
from shardwise.core.plan import Plan
from shardwise.core.zero import ROWS, STATE_BYTES, bytes_per_parameter
from shardwise.engine import tensor_parallel
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer_spec import AdamW
from shardwise.engine.parallelize import parallelize
from shardwise.engine.partition import balance_by_time
from shardwise.engine.stage_module import fitting, schedule_of
from shardwise.models import gpt
from shardwise.models.gpt import GPT, SIZES, GPTConfig
from shardwise.models.initial import initial
from shardwise.train.config import ModelSection
from shardwise.train.data import Rows, padded
from shardwise.train.prepare import Prepared
from shardwise.train.progress import size_text

Batch = dict[str, Tensor]
LAYER_BYTES: Final = 2**14  # at least, of the modules of a layer without weights, in each process
GPU_BYTES: Final = 2**39  # no GPU has more


def gpt_config(section: ModelSection, vocabulary: int) -> GPTConfig:
    """The sizes: the named ones, the tokens' own vocabulary, and over them what is given."""
    if section.name not in SIZES:
        close = difflib.get_close_matches(section.name, SIZES, n=1, cutoff=0.0)
        raise bad(f"model.name = '{section.name}'", ", ".join(SIZES), f"model.name = '{close[0]}'")
    given: dict[str, Any] = {"vocabulary": vocabulary, **section.sizes()}
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = given["heads"]
    return replace(SIZES[section.name], **given)


def state_bytes(sizes: GPTConfig, plan: Plan) -> int:
    """What all ranks of the plan hold between steps, at least: weights, gradients, Adam's state.

    Padding, what tensor ranks hold in common and activations come on top.
    """
    shard = plan.mesh.size_of(plan.shard_axis or "none")
    each = bytes_per_parameter(ROWS[plan.row], shard, *STATE_BYTES[plan.precision or "fp32"])
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
        near = difflib.get_close_matches(unknown[0].lower() if unknown else "", ways, 1, 0.0)
        raise bad(
            f"plan.stages = '{given}'"
            + (f", of which {unknown[0]} is no module of the model" if names else ""),
            "parameters, time, or the modules that begin the stages but the first, such as "
            + ", ".join(name for name in known if name.count(".") == 1 and name[-1].isdigit()),
            f"plan.stages = '{near[0]}'",
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
