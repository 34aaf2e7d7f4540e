"""What a run is made from, checked before anything starts: plan, folder, tokens, model sizes.

Everything a user can get wrong is found here, in the order of what it costs to find. Where the
command starts several ranks it prepares once before them: a bad input is one paragraph and not one
a rank, and the ranks find the data tokenised.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from shardwise.comm.rendezvous import environment
from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.train import folder
from shardwise.train.config import Config
from shardwise.train.data import Batches, Corpus, split
from shardwise.train.packed import tokenise
from shardwise.train.sources import find
from shardwise.train.tokens import Vocabulary, check_fits

if TYPE_CHECKING:
    from shardwise.models.gpt import GPTConfig


@dataclass(frozen=True)
class Start:
    """How the run's folder is entered: continued, replaced, or (neither) expected to be new.

    `auto`: continued where a run has saved a checkpoint, else begun, over a run that saved none.
    """

    resume: bool = False
    overwrite: bool = False
    auto: bool = False

    def settled(self, config: Config) -> "Start":
        """What `auto` comes to in the folder as it is; any other start itself.

        Called by all ranks before one of them changes the folder.
        """
        if not self.auto or self.overwrite:
            return replace(self, resume=self.resume or self.auto, auto=False)
        saved = folder.saved(config)
        return Start(resume=saved, overwrite=not saved and folder.is_run(config.folder))


@dataclass(frozen=True)
class Prepared:
    """Inputs that hold: each value is checked against the others."""

    config: Config
    plan: Plan
    corpus: Corpus
    sizes: "GPTConfig"

    @property
    def batches(self) -> Batches:
        """The order of training."""
        return Batches(self.corpus, self.config.train.batch, self.config.train.seed)

    @property
    def vocabulary(self) -> Vocabulary:
        """What the tokens mean."""
        return self.corpus.packed.vocabulary

    @property
    def data_mark(self) -> dict[str, object]:
        """What must be the same for a number of consumed sequences to mean the same place."""
        return {
            "tokens": self.corpus.packed.key,
            "sequence": self.corpus.sequence,
            "validation": self.config.data.validation,
            "seed": self.config.train.seed,
        }


def checked_plan(config: Config, ranks: int) -> Plan:
    """The plan completed for that many ranks. Raises InputError if it cannot run on them."""
    plan = Plan.parse(config.plan.text)
    require(plan, ranks)
    plan = plan.completed(ranks)
    if config.run.trace and plan.pipeline is None:
        raise bad(
            f"--trace (run.trace = true) under the plan '{plan}', which has no pipeline",
            "a plan with a pipeline, whose schedule has a timeline to measure",
            "--plan 'pp2 1f1b:4', for example, or leave --trace out",
        )
    least = plan.microbatches * plan.data_size
    if least > config.train.batch:
        what = "each rank" if plan.pipeline is None else "each data rank"
        raise bad(
            f"train.batch = {config.train.batch} under the plan '{plan}', whose step has "
            f"{plan.data_size} x {plan.microbatches} microbatches",
            f"{least} or more: one for {what} and microbatch",
            f"train.batch = {least}",
        )
    return plan


def check_same(before: "GPTConfig", now: "GPTConfig") -> None:
    """Raise InputError unless the model to resume with has the sizes of the one that was saved."""
    saved, given = asdict(before), asdict(now)
    other = [name for name in saved if saved[name] != given[name]]
    if other:
        raise bad(
            "--resume with " + ", ".join(f"model.{n} = {given[n]} (was {saved[n]})" for n in other),
            "the sizes that the run's checkpoints have",
            ", ".join(f"model.{n} = {saved[n]}" for n in other) + ", or --overwrite for a new run",
        )


def prepare(config: Config, ranks: int, start: Start) -> Prepared:
    """Everything a run on `ranks` ranks needs. Raises InputError for all that cannot work."""
    plan = checked_plan(config, ranks)
    folder.check(config, start.resume, start.overwrite)
    source = find(config.data.source, config.data.field, config.data.encoding)
    packed = tokenise(source, config.data.tokens, config.cache)

    # imports torch, which takes seconds: what was refused so far was refused without it
    from shardwise.train.sizes import gpt_config, machine_bytes, require_fit, require_memory

    sizes = gpt_config(config.model, packed.vocabulary.size)
    check_fits(packed.vocabulary, sizes.vocabulary)
    require_fit(sizes, plan)
    # of ranks that others have started, this one at least is here
    share = 1.0 if environment() is None else 1 / ranks
    require_memory(sizes, plan, machine_bytes(config.run.device), share)
    before = folder.configured(config.folder) if start.resume else None
    if before is not None:
        check_same(gpt_config(before.model, packed.vocabulary.size), sizes)
    return Prepared(config, plan, split(packed, sizes.sequence, config.data.validation), sizes)
