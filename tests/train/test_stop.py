"""The stop to stop: heard, agreed on, counted."""

import os
import signal

import pytest

from shardwise.comm.ledger import Key
from shardwise.comm.world import World
from shardwise.train.stop import any_rank, ranks_with
from shardwise.train.stop_signal import StopSignal
from tests.pool import run_threads


def agreed(world: World, wishing: list[int]) -> tuple[bool, list[int], dict[Key, int]]:
    flag = world.rank in wishing
    found = any_rank(flag, world), ranks_with(flag, world)
    return *found, {key: tally.sent_bytes for key, tally in world.ledger.lines.items()}


def test_one_rank_is_enough() -> None:
    """All four ranks hear of the one that was asked, and know which it was."""
    assert [result[:2] for result in run_threads(4, agreed, [2])] == [(True, [2])] * 4
    assert [result[:2] for result in run_threads(4, agreed, [])] == [(False, [])] * 4


def test_agreement_is_in_the_ledger() -> None:
    """Twice an all-reduce of four bytes over four ranks: 2 * 2 * 4 * 3/4 bytes, phase check."""
    for *_, lines in run_threads(4, agreed, [0]):
        assert lines == {Key("world", "all_reduce", "check"): 12}


def test_a_signal_is_a_wish_and_a_second_one_is_an_end() -> None:
    """The first sets the flag and gives the handlers back; so does leaving without any."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
        assert signal.getsignal(signal.SIGTERM) is before
    with StopSignal() as stop:
        pass
    assert not stop.received
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_nobody_waits_for_leaves_at_once() -> None:
    """While it may leave alone, the signal ends what it is doing, and is remembered."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal(leaving=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
        assert signal.getsignal(signal.SIGTERM) is before
