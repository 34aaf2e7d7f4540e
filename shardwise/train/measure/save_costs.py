"""What the checkpoints of a run cost, as rank 0 saw it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveCosts:
    """The costs of the checkpoints that this process saved.

    saves    checkpoints that were published
    held_s   seconds in which no step ran: those of whole saves, and of snapshots
    write_s  seconds of threads that wrote beside the steps; 0 for synchronous saves
    """

    saves: int = 0
    held_s: float = 0.0
    write_s: float = 0.0

    def text(self) -> str:
        """The costs in words."""
        beside = f"; written beside them in {self.write_s:.2f} s" if self.write_s else ""
        return f"{self.saves} saved, which held the steps for {self.held_s:.2f} s{beside}"
