"""Metrics as a run of MLflow.

The store is the one that MLflow's own settings name: `MLFLOW_TRACKING_URI` and its neighbours. A
thread of MLflow sends the metrics, so a server that does not answer holds no step.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.callbacks.callback import Callback, RunFacts
from shardwise.callbacks.installed import require_installed
from shardwise.core.errors import bad

FOLDER = "shardwise.folder"  # the tag by which a resumed run finds itself
MOST_PARAMS, MOST_CHARACTERS = 100, 500  # of one call, and of a value


class MLflow(Callback):
    """A run of MLflow, named after the run's folder; a resumed run continues it.

    `experiment` is made if it does not exist. Raises InputError if MLflow is not installed.
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
                "MLFLOW_TRACKING_URI=http://HOST:5000 before the command, or pip install mlflow "
                "for a database in a file",
            ) from error

    def _begun(self, run: RunFacts) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        tags = {"mlflow.runName": run.folder.name, FOLDER: str(Path(run.folder).absolute())}
        if run.step:
            quoted = json.dumps(tags[FOLDER])  # a page of runs is not all of them
            for before in self._client.search_runs([number], f"tags.`{FOLDER}` = {quoted}"):
                self._client.update_run(before.info.run_id, status="RUNNING")
                return before.info.run_id
        made = self._client.create_run(number, tags=tags).info.run_id
        self._log_config(made, run.config)
        return made

    def _log_config(self, number: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        flat = _flat(config)
        while some := list(itertools.islice(flat, MOST_PARAMS)):
            params = [Param(name, str(value)[:MOST_CHARACTERS]) for name, value in some]
            self._client.log_batch(number, params=params)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        logged = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=logged, synchronous=False)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step_ended(step, metrics)

    def run_ended(self, error: BaseException | None) -> None:
        if self._id:
            import mlflow

            mlflow.flush_async_logging()
            self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted names: train.lr."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
