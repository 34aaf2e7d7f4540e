"""The plan and the model of a command: named on the command line, or those of a run.

shardwise predict "dp2 zero3" --model gpt      both by name
shardwise predict --config run.toml            those of `shardwise train run.toml`
shardwise predict "tp2" --config run.toml      that run under another plan
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.train.config import Config, read
from shardwise.train.data.tokens import vocabulary_size
from shardwise.train.prepare import checked_plan

if TYPE_CHECKING:
    from shardwise.core.layouts.tensor_table import Table
    from shardwise.engine.options import EngineOptions
    from shardwise.models.registry import Sizes
    from shardwise.models.trainable import Trainable

#: The argument and the option of a command that takes both.
PLAN: Final = typer.Argument(
    metavar="[PLAN]", help='Such as "dp2 zero3 bf16"; if not given, that of --config.'
)
CONFIG: Final = typer.Option(
    "--config", metavar="FILE", help="The configuration of a run: its model, plan and batch."
)
MODEL: Final = typer.Option(
    help="gpt, llama:70b, toy:TYPE, hf:./FOLDER, hf:ID, file.py:build and others; gpt if not given."
)
SEQUENCE: Final = typer.Option(help="Positions of a row; the model's own if not given.")
JSON: Final = typer.Option("--json", help="Print one JSON object.")


@dataclass(frozen=True)
class PlannedModel:
    """A plan and the name of its model; or a run's, with the configuration `config`."""

    plan: Plan
    name: str
    config: Config | None = None

    @property
    def model(self) -> "Trainable | str":
        """The argument of `find`; a run's model has random tokens as its batches."""
        if self.config is None:
            return self.name
        from shardwise.models.registry import of_sizes

        return of_sizes(self.name, self.sizes, self.config.train.seed)

    @property
    def sizes(self) -> "Sizes":
        """The sizes of the run's model. `bpe:SIZE` counts as SIZE tokens before it is trained."""
        from shardwise.train.model import model_sizes

        assert self.config is not None
        config, size = self.config, vocabulary_size(self.config.data.tokens)
        return model_sizes(config.model, size, config.train.seed, weights=False)

    @property
    def table(self) -> "Table | None":
        if self.config is None or self.config.plan.table is None:
            return None
        from shardwise.verify.inputs import table_in

        return table_in(Path(self.config.plan.table), "plan.table =")

    @property
    def batch(self) -> int | None:
        return None if self.config is None else self.config.train.batch

    @property
    def device(self) -> str:
        return "auto" if self.config is None else self.config.run.device

    @property
    def rows(self) -> int | None:
        """The rows of the first data rank in a step of the run; no rank has more."""
        if self.config is None:
            return None
        return -(-self.config.train.batch // self.plan.shares)

    def options(
        self, trainable: "Trainable", table: "Table | Mapping[str, str] | None", device: str
    ) -> "EngineOptions":
        """The options of a run's engine, or of a proof's, with the kernels of a device."""
        from shardwise.train.model import options_of_run
        from shardwise.verify import parity
        from shardwise.verify.inputs import Options
        from shardwise.verify.oracles.oracles import is_asynchronous

        if self.config is not None:
            return replace(options_of_run(self.config, self.sizes, table), kernels=device)
        found = parity.build_options(trainable, self.plan, Options(table=table))
        clip = None if is_asynchronous(self.plan) else 1.0
        return replace(found, clip=clip, kernels=device)


def configured(config: Path | None, plan: str | None, model: str | None) -> PlannedModel:
    """The plan and the model of a command line; each replaces that of the configuration."""
    if config is None:
        if plan is None:
            instead = '"dp2 zero3", or --config run.toml'
            raise bad("no plan", "a plan, or the configuration of a run", instead)
        found = Plan.parse(plan)
        require(found)
        return PlannedModel(found, model or "gpt")
    overrides = [] if plan is None else [f"plan.text={plan}"]
    overrides += [] if model is None else [f"model.name={model}"]
    settings = read(config, overrides)
    checked = checked_plan(settings, Plan.parse(settings.plan.text).size)
    return PlannedModel(checked, f"{settings.model.name} of {config.name}", settings)
