"""Metrics as a run of Weights & Biases.

`WANDB_MODE=offline` writes into the run's folder alone, for `wandb sync` later; `WANDB_PROJECT`,
`WANDB_ENTITY` and the other variables of wandb apply.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.callbacks.callback import END_S, Callback, RunFacts
from shardwise.callbacks.installed import require_installed
from shardwise.core.errors import bad


class WandB(Callback):
    """A run of wandb, named after the run's folder; a resumed run continues it.

    Raises InputError if wandb is not installed.
    """

    optional = True

    def __init__(self, project: str | None = None) -> None:
        require_installed("wandb")
        self._project = project
        self._run: Any = None

    def run_began(self, run: RunFacts) -> None:
        """Start the run. Raises InputError if wandb refuses it, for example without a login."""
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        before = _last_id(run.folder) if run.step else None
        try:
            self._run = wandb.init(
                project=self._project,
                name=run.folder.name,
                dir=str(run.folder),
                config=dict(run.config),
                id=before,
                resume="allow" if before else None,
                settings=wandb.Settings(console="off", silent=True, finish_timeout=END_S / 2),
            )
        except wandb.Error as error:
            raise bad(
                f"the tracker wandb, which did not start: {error}",
                "a login (wandb login, or WANDB_API_KEY), or a run without the network",
                "WANDB_MODE=offline before the command",
            ) from error
        # not wandb's own step, which never goes back: a resumed run repeats steps
        self._run.define_metric("*", step_metric="step")

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step_ended(step, metrics)

    def run_ended(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _last_id(folder: Path) -> str | None:
    """The id of the newest run in the folder, which wandb names run-DATE-ID or offline-run-..."""
    runs = (folder / "wandb").glob("*run-*-*")
    named = sorted(path.name[path.name.index("run-") :] for path in runs if path.is_dir())
    return named[-1].rpartition("-")[2] if named else None
