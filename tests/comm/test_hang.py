"""Ranks that wait for what cannot come are told where, within seconds; others are left alone."""

import time

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

from shardwise.comm.move import all_reduce, receive
from shardwise.comm.start import call_stack, peers
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import init
from shardwise.core.errors import RankError


def take_fewer_steps_on_1(closes: bool) -> None:
    world = init("cpu")
    for step in range(3):
        if step < 2 or world.rank == 0:
            all_reduce(torch.ones(1), world.everyone)
    if closes:
        world.close()
        time.sleep(60)


@pytest.mark.full
@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_waits_for_one_that_is_done_is_told(closes: bool):
    """A loader that gives one rank fewer batches is an error, not a program that hangs."""
    with pytest.raises(
        RankError,
        match=r"rank 1 has left, but .*all_reduce on axis world, called by take_fewer",
    ) as caught:
        spawn(take_fewer_steps_on_1, 2, (closes,))
    assert caught.value.rank == 0


def wait_for_each_other() -> None:
    """Each rank waits for a message of the other."""
    peers._ALL_S = 4.0
    world = init("cpu")
    receive(torch.ones(1), world.everyone, 1 - world.rank)


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_told():
    """None of them is done, and none would ever be."""
    with pytest.raises(RankError, match=r"every rank is waiting in a collective") as caught:
        spawn(wait_for_each_other, 2)
    assert "in wait_for_each_other" in str(caught.value)


def meet_without_1(alone: bool) -> None:
    """Rank 1 returns before anybody has met."""
    world = init("cpu")
    if world.rank == 1:
        return
    if alone:
        time.sleep(6)
    else:
        all_reduce(torch.ones(1), world.everyone)


def test_ranks_that_wait_for_one_that_never_came_are_told():
    """Nobody else can come to what they wait for: an error with its place, within seconds."""
    with pytest.raises(RankError, match=r"rank 1 ended the program.*same number") as caught:
        spawn(meet_without_1, 3, (False,))
    assert caught.value.rank != 1
    assert "in meet_without_1" in str(caught.value)
    assert "worker.py" not in str(caught.value)


def test_writing_a_checkpoint_is_no_waiting_for_others():
    """A rank that torch's own modules keep busy is not where others have to come."""
    assert distributed_c10d.__file__.startswith(call_stack._COLLECTIVE_FILES)
    assert not filesystem.__file__.startswith(call_stack._COLLECTIVE_FILES)


@pytest.mark.full
def test_a_rank_may_go_on_alone_for_as_long_as_it_likes():
    """What a rank does without the others is none of their business."""
    assert spawn(meet_without_1, 2, (True,)) == [None, None]
