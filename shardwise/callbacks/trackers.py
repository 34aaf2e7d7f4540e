"""The trackers: event files of TensorBoard, runs of Weights & Biases, runs of MLflow.

wandb's variables apply: `WANDB_MODE=offline` writes into the run's folder alone, for `wandb sync`
later. `MLFLOW_TRACKING_URI` and its neighbours name MLflow's store; a thread of MLflow sends the
metrics, so a server that does not answer delays no step.
"""

import itertools
import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from shardwise.callbacks.callback import END_S, Callback, RunFacts
from shardwise.core.errors import bad
from shardwise.core.tools.tree import dotted

PACKAGES: Final = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
FOLDER: Final = "shardwise.folder"  # the MLflow tag by which a resumed run finds itself
MOST_PARAMS, MOST_CHARACTERS = 100, 500  # of one call, and of a value


class TensorBoard(Callback):
    """Writes event files into `folder`; None: `tensorboard` in the run's folder."""

    optional = True

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._board: Any = None

    def run_began(self, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder or run.folder / "tensorboard"
        self._board = SummaryWriter(str(folder), purge_step=run.step + 1)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    evaluated = step_ended

    def run_ended(self, error: BaseException | None) -> None:
        if self._board is not None:
            self._board.close()


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

    evaluated = step_ended

    def run_ended(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _last_id(folder: Path) -> str | None:
    """The id of the newest run in the folder, which wandb names run-DATE-ID or offline-run-..."""
    runs = (folder / "wandb").glob("*run-*-*")
    named = sorted(path.name[path.name.index("run-") :] for path in runs if path.is_dir())
    return named[-1].rpartition("-")[2] if named else None


class MLflow(Callback):
    """A run of MLflow, named after the run's folder; a resumed run continues it.

    `experiment` is created if it does not exist. Raises InputError if MLflow is not installed.
    """

    optional = True

    def __init__(self, experiment: str = "shardwise") -> None:
        require_installed("mlflow")
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def run_began(self, run: RunFacts) -> None:
        """Start the run. Raises InputError if the store cannot be used."""
        import mlflow

        try:
            self._client = mlflow.MlflowClient()
            self._id = self._begun(run)
        except (mlflow.MlflowException, ImportError) as error:
            raise bad(
                f"the tracker mlflow, whose store {mlflow.get_tracking_uri()} gives: {error}",
                "a server, or a store that the installed MLflow can use",
                "MLFLOW_TRACKING_URI=http://HOST:5000 before the command, or pip install mlflow",
            ) from error

    def _begun(self, run: RunFacts) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        tags = {"mlflow.runName": run.folder.name, FOLDER: str(Path(run.folder).absolute())}
        if run.step:
            quoted = json.dumps(tags[FOLDER])  # a page of runs is not all of them
            for before in self._client.search_runs([number], f"tags.`{FOLDER}` = {quoted}"):
                self._client.update_run(before.info.run_id, status="RUNNING")
                return before.info.run_id
        made = self._client.create_run(number, tags=tags).info.run_id
        config = dotted(run.config)
        while some := list(itertools.islice(config, MOST_PARAMS)):
            params = [Param(name, str(value)[:MOST_CHARACTERS]) for name, value in some]
            self._client.log_batch(made, params=params)
        return made

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        logged = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=logged, synchronous=False)

    evaluated = step_ended

    def run_ended(self, error: BaseException | None) -> None:
        if self._id:
            import mlflow

            mlflow.flush_async_logging()
            self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def require_installed(module: str) -> None:
    """Raise InputError with the command that installs the tracker, if it is missing."""
    if find_spec(module) is None:
        raise bad(
            f"the tracker {module}, which is not installed",
            "a tracker that is installed",
            f"pip install {PACKAGES[module]}",
        )
