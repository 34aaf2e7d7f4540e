"""Preparation of a run: checks plan, folder, tokens and model sizes before anything starts.

The checks run in order of their cost. A command that starts several ranks prepares once before
starting them, so that a wrong input is one paragraph instead of one per rank.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.checkpoint.folder import require_snapshots
from shardwise.checkpoint.lock import RUN_LOCK, locked
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.prediction.cluster import cluster_of
from shardwise.train import run_folder
from shardwise.train.config import Config
from shardwise.train.config_sections import TRACKERS, RunSection
from shardwise.train.data.data import Batches, Corpus, split
from shardwise.train.data.packed import tokenise, using_folder
from shardwise.train.data.sources import Source, find
from shardwise.train.data.tokens import check_fits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.callbacks import Callback
    from shardwise.core.layouts.tensor_table import Table
    from shardwise.models.registry import Sizes


@dataclass(frozen=True)
class RunStart:
    """How to use the run's folder: continue the run, replace it, or (neither) require a new one.
    `auto`: continue if a checkpoint was saved, else start, replacing a run without one.
    """

    resume: bool = False
    overwrite: bool = False
    auto: bool = False

    def resolve_auto(self, config: Config) -> "RunStart":
        """Resolve `auto` by the folder. All ranks call it before one of them changes the folder."""
        if not self.auto or self.overwrite:
            return replace(self, resume=self.resume or self.auto, auto=False)
        saved = run_folder.has_checkpoint(config) or bool(run_folder.unreadable_checkpoints(config))
        return RunStart(resume=saved, overwrite=not saved and run_folder.is_run(config.folder))


@dataclass(frozen=True)
class PreparedRun:
    """The checked inputs of a run."""

    config: Config
    plan: Plan
    corpus: Corpus
    sizes: "Sizes"
    table: "Table | Mapping[str, str] | None" = None
    callbacks: "Sequence[Callback]" = ()

    @property
    def batches(self) -> Batches:
        train = self.config.train
        return Batches(self.corpus, train.batch, train.seed, self.config.data.weights)

    @property
    def data_mark(self) -> dict[str, object]:
        """The identity of the data, which must not change when a run is resumed."""
        return {
            "tokens": self.corpus.packed.key,
            "sequence": self.corpus.sequence,
            "validation": self.config.data.validation,
            "weights": list(self.config.data.weights),
            "seed": self.config.train.seed,
        }


def checked_plan(config: Config, ranks: int) -> Plan:
    """The plan completed for `ranks`. Raises InputError if it cannot run on them."""
    plan = Plan.parse(config.plan.text)
    require(plan, ranks)
    plan = plan.completed(ranks)
    if config.train.async_save:
        require_snapshots(plan)
    least = plan.microbatches * plan.shares
    if least > config.train.batch:
        what = "each rank" if plan.pipeline is None else "each data rank"
        raise bad(
            f"train.batch = {config.train.batch} under the plan '{plan}', whose step has "
            f"{plan.shares} x {plan.microbatches} microbatches",
            f"{least} or more: one for {what} and microbatch",
            f"train.batch = {least}",
        )
    return plan


def callbacks_of(config: RunSection) -> "Sequence[Callback]":
    """The trackers and the user's callbacks."""
    from shardwise import callbacks

    made: list[Callback] = [
        getattr(callbacks, TRACKERS[name])() for name in dict.fromkeys(config.trackers)
    ]
    if config.callbacks:
        from shardwise.models.user import made_by

        returns = "a function that returns a callback"
        made += [made_by(name, "the callback", returns) for name in config.callbacks]
    callbacks.Callbacks(made)  # checks them
    return made


def check_same(old: "Sizes", new: "Sizes") -> None:
    """Raise InputError unless the model has the sizes of the saved one."""
    saved, given = old.numbers, new.numbers
    other = [name for name in saved | given if saved.get(name) != given.get(name)]
    if other:
        changes = ", ".join(f"model.{n} = {given.get(n)} (was {saved.get(n)})" for n in other)
        before = ", ".join(f"model.{n} = {saved.get(n)}" for n in other)
        allowed = "the sizes that the run's checkpoints have"
        raise bad(f"--resume with {changes}", allowed, f"{before}, or --overwrite for a new run")


def sources_of(config: Config) -> list[Source]:
    """The sources of training, and that of validation, if there is one."""
    data = config.data
    names = (*data.source, *([data.validation_source] if data.validation_source else ()))
    return [find(name, data.field) for name in names]


def prepare(
    config: Config, ranks: int, start: RunStart, most_bytes: float = math.inf
) -> PreparedRun:
    """Check and prepare the inputs of a run; a check alone tokenises only some `most_bytes`."""
    plan = checked_plan(config, ranks)
    if config.run.cluster is not None:
        cluster = cluster_of(config.run.cluster)
        cluster.require_hosts(plan.size)
        cluster.flops_per_s(plan.precision or "fp32")
    run_folder.check(config, start.resume, start.overwrite)
    run_folder.first_weights(config)
    called = callbacks_of(config.run)
    data = config.data
    if data.documents and ".py" in config.model.name:
        raise bad(
            f"data.documents with model.name = '{config.model.name}'",
            "a model of the package or of transformers, whose attention takes a mask",
            "data.documents = false, or a loop of your own with sw.parallelize",
        )
    sources = [replace(source, most_bytes=most_bytes) for source in sources_of(config)]
    packed = tokenise(sources, data.tokens, config.cache, trained=len(data.source))

    # imports torch, which takes seconds; the checks so far did not need it
    from shardwise.train.model import model_sizes, require_fit, run_table

    sizes = model_sizes(config.model, packed.vocabulary.size, config.train.seed)
    check_fits(packed.vocabulary, sizes.vocabulary, config.model.name)
    apart = data.validation_source is not None
    corpus = split(packed, sizes.sequence, data.validation, apart=apart)
    there, each = len(corpus.training), [len(found) for found in corpus.by_source]
    if not len(corpus.validation) or (data.weights and 0 in each[: len(data.source)]):
        raise bad(
            f"sources of which one has no sequence of {sizes.sequence} tokens",
            "a sequence from each source with weights, and from that of the validation",
            f"model.sequence = {max(1, sizes.sequence // 2)}, or more data",
        )
    if config.train.batch > there:
        raise bad(
            f"train.batch = {config.train.batch} with {there} training sequences",
            "at most the number of training sequences",
            f"train.batch = {there}, or more data",
        )
    table = run_table(config.plan.table, sizes, plan)
    require_fit(sizes, plan, table)
    before = run_folder.config_of(config.folder) if start.resume else None
    if before is not None:
        check_same(model_sizes(before.model, packed.vocabulary.size), sizes)
    return PreparedRun(config, plan, corpus, sizes, table, called)


@contextmanager
def hold_folder(config: Config, start: RunStart, patience_s: float = 0.0) -> Iterator[RunStart]:
    """Hold the lock on the run's folder; yields `start` with `auto` resolved under it."""
    with ExitStack() as held:
        with using_folder(config.folder, "run.folder"):
            held.enter_context(locked(config.folder / RUN_LOCK, patience_s))
        yield start.resolve_auto(config)
