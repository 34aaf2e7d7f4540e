import subprocess
import sys
import threading
import time

import pytest
import torch

from shardwise.comm.move import all_reduce, receive
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from tests.pool import run_threads


def lopsided(world: World) -> None:
    if world.rank == 1:
        raise ArithmeticError("one of three")
    all_reduce(torch.zeros(4), world.everyone)


def test_a_thread_that_fails_ends_the_others():
    """Those that wait in a collective are released, and the first error is the one that is told."""
    alive = set(threading.enumerate())
    with pytest.raises(RankError, match="ArithmeticError: one of three") as caught:
        run_threads(3, lopsided)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert not set(threading.enumerate()) - alive


def lose_and_wrap(world: World) -> None:
    """Rank 0 reports what it lost in words of its own, before rank 1 has ended."""
    try:
        if world.rank == 1:
            time.sleep(0.2)
            raise ArithmeticError("the cause")
        world.everyone.transport.board.gate.abort()  # type: ignore[attr-defined]
        all_reduce(torch.zeros(4), world.everyone)
    except RuntimeError as error:
        raise ValueError("a message did not come") from error


def test_an_error_that_follows_from_another_is_not_the_cause():
    """However a rank words that another has failed."""
    with pytest.raises(RankError, match="the cause") as caught:
        run_threads(2, lose_and_wrap)
    assert caught.value.rank == 1


def late(world: World) -> None:
    if world.rank == 0:
        raise ArithmeticError("before anybody came")
    time.sleep(0.05)
    all_reduce(torch.zeros(4), world.everyone)


def test_a_rank_that_comes_after_the_failure_is_ended_too():
    """A gate that was broken before a rank came to it stays broken."""
    with pytest.raises(RankError, match="before anybody came"):
        run_threads(2, late)


def waits_for_a_message(world: World) -> None:
    if world.rank == 0:
        raise ArithmeticError("no message will come")
    receive(torch.zeros(4), world.everyone, 0)


def test_a_rank_that_waits_for_a_message_is_ended_too():
    """The receiver of a message whose sender has failed does not wait for its patience to end."""
    started = threading.Event()

    def run() -> None:
        with pytest.raises(RankError, match="no message will come"):
            run_threads(2, waits_for_a_message)
        started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)


def own_copy(world: World) -> list[float]:
    x = torch.full((2,), float(world.rank))
    for _ in range(50):
        all_reduce(x, world.everyone)
        x.div_(world.size)
    return x.tolist()


def test_ranks_do_not_write_into_each_others_tensors():
    """Fifty rounds of sums in place, without a lock in sight, stay exact."""
    assert run_threads(4, own_copy) == [[1.5, 1.5]] * 4


#: A collection of garbage begins in some calls of `get_state`, and a finalizer switches threads.
STATES_AND_GARBAGE = """
import faulthandler, gc, time, torch
from tests.threads import on_threads

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)

def read(rank, links):
    for i in range(1000):
        objects = [[] for _ in range(i % 5)]
        Cycle()
        torch.default_generator.get_state()

faulthandler.dump_traceback_later(40, exit=True)
gc.freeze()
for threshold in range(5, 15):
    gc.set_threshold(threshold)
    on_threads(2, read)
assert gc.isenabled()
"""


def test_ranks_that_read_the_state_of_a_generator_do_not_deadlock():
    """Torch holds a lock of its own in `get_state`: garbage is not collected there."""
    subprocess.run([sys.executable, "-c", STATES_AND_GARBAGE], check=True, timeout=120)
