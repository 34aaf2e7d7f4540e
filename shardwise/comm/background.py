"""Work of threads beside the steps of a world: one job for each folder that is written."""

from pathlib import Path
from typing import Protocol


class BackgroundJob(Protocol):
    """A thread that writes into a folder."""

    def wait(self) -> None:
        """Wait for this rank's part.  Raises nothing."""
        ...

    def report(self) -> None:
        """Warn of a failure of this rank that nothing has reported yet.  Does not wait."""
        ...

    def settle(self) -> None:
        """Wait for the parts of all ranks, and warn of a failure.  Called by all ranks."""
        ...


class Background:
    """The jobs of one world that have not been settled, by the folder that they write."""

    def __init__(self) -> None:
        self.jobs: dict[Path, BackgroundJob] = {}

    def wait(self) -> None:
        """Wait for this rank's part of all jobs, and report failures."""
        for job in self.jobs.values():
            job.wait()
        self.report()

    def report(self) -> None:
        """Warn of each failure once."""
        for job in self.jobs.values():
            job.report()

    def settle(self, folder: Path | None = None) -> None:
        """Wait for the job of a folder (None: for all) on all ranks.  Called by all ranks."""
        for path, job in [*self.jobs.items()]:
            if folder is None or folder.absolute() == path:
                job.settle()
