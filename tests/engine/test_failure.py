import os
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwise.comm.launch import spawn
from shardwise.comm.world import init
from shardwise.core.errors import RankError
from tests.engine.cases import Case, build, rows_task, settled, share, vectors
from tests.engine.test_step import Fragile


def fragile() -> torch.nn.Module:
    return settled(Fragile())


def trains(folder: Path) -> None:
    """Rank 1 of 3 raises in the middle of the second step's backward."""
    world = init("cpu")
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    engine = build(world, rows_task(fragile), Case("dp3 zero3 fp64"))
    assert isinstance(engine.model, Fragile)
    for step in range(50):
        if world.rank == 1 and step == 1:
            engine.model.goes_off, engine.model.forwards = "backward", 1
        engine.step(share(vectors(step), engine.data_rank, engine.data_ranks))


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_process_that_raises_in_backward_ends_the_others(tmp_path: Path):
    """Those that wait for its gradients are ended, and its own error is the one that is raised."""
    with pytest.raises(RankError, match="in the middle of backward") as caught:
        spawn(partial(trains, tmp_path), 3)
    assert caught.value.rank == 1
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)
