"""A small command-line program for the tests of launchers, which runs the action that it is given.

launch(["raise"], 2)        under `launch`
python -m program kill 1    under no launcher, for the tests of the start and of the peers
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.move import all_reduce
from shardwise.comm.world import World, init


def meet_and_wait(folder: Path) -> None:
    world = init("cpu")
    world.barrier()
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def main() -> None:
    """What a rank of `launch` does."""
    world, what = init(), sys.argv[1]
    world.barrier()
    if what == "refuse" or (what == "refuse-on-1" and world.rank == 1):
        print("Given: nothing. Allowed: something. Write instead: this.", file=sys.stderr)
        sys.exit(2)
    if what == "raise" and world.rank == 1:
        raise ArithmeticError("the loss is not finite")
    if what != "end":
        time.sleep(60)


def started_alone(what: str, rank: str = "") -> None:
    """What a rank does that no launcher of ours has started."""
    world = init("cpu")
    all_reduce(torch.ones(1), world.everyone)
    if what in ("part", "pipe"):
        lose(world, what)
    if what in ("stop", "kill") and world.rank == int(rank):
        time.sleep(1)  # time for a beat that says where
        os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    if what == "sleep":
        print("met", flush=True)
    if what in ("kill", "sleep"):  # nobody waits for a message of the dead rank
        time.sleep(60)
    all_reduce(torch.ones(1), world.everyone)
    print(f"rank {world.rank} has ended", flush=True)


def lose(world: World, what: str) -> None:
    """Rank 1 is gone; rank 0 waits for it in a pipe, or goes on."""
    model = sw.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, world=world)
    if world.rank == 1:
        os._exit(3)
    if what == "pipe":
        model(torch.ones(4, 2)).sum().backward()


if __name__ == "__main__":
    started_alone(*sys.argv[1:])
