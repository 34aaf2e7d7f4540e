"""A program whose ranks meet without our launcher, for the tests of the start and of the peers."""

import os
import signal
import sys
import time

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.move import all_reduce
from shardwise.comm.world import init


def main(what: str) -> None:
    world = init("cpu")
    all_reduce(torch.ones(1), world.everyone)
    signals = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
    act, _, rank = what.partition(" ")
    if act == "pipe":
        model = sw.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, world=world)
    if act in ("part", "pipe") and world.rank == 1:
        os._exit(3)
    if act == "pipe":
        model(torch.ones(4, 2)).sum().backward()
    if act in signals and world.rank == int(rank):
        time.sleep(1)  # time for a beat that says where
        os.kill(os.getpid(), signals[act])
    if act == "sleep":
        print("met", flush=True)
    if act in ("kill", "sleep"):  # nobody waits for a message of the dead rank
        time.sleep(60)
    if world.rank == 1 and what == "hang":
        time.sleep(60)
    all_reduce(torch.ones(1), world.everyone)
    print(f"rank {world.rank} has ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
