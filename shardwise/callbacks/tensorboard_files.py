"""Metrics as event files of TensorBoard: `tensorboard --logdir runs`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.callbacks.callback import Callback, RunFacts

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes event files into `folder`; None: `tensorboard` in the run's folder."""

    optional = True

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._board: SummaryWriter | None = None

    def run_began(self, run: RunFacts) -> None:
        """Open the files; points after the resumed step are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder or run.folder / "tensorboard"
        self._board = SummaryWriter(str(folder), purge_step=run.step + 1)

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step_ended(step, metrics)

    def run_ended(self, error: BaseException | None) -> None:
        if self._board is not None:
            self._board.close()
