"""The ledger: what is written under which axis, kind and phase."""

import pickle

import torch

from shardwise.comm.ledger import Key, Ledger, Tally


def write(ledger: Ledger, kind: str, numel: int, dtype: torch.dtype) -> None:
    """One call on dp that hands a tensor to one peer."""
    ledger.begin("dp", kind).add(torch.empty(0, dtype=dtype), numel)


def test_lines_of_one_key_add_up():
    """Calls, elements and bytes of the same axis, kind and phase are one line."""
    ledger = Ledger()
    write(ledger, "all_reduce", 10, torch.float32)
    write(ledger, "all_reduce", 5, torch.float16)
    assert ledger.lines == {Key("dp", "all_reduce", "start"): Tally(2, 15, 50, 2)}
    assert ledger.sent_bytes() == 50


def test_a_phase_lasts_for_its_block_even_if_it_raises():
    """Inside `phase` lines carry its name; afterwards the name before is back."""
    ledger = Ledger()
    ledger.now = "backward"
    try:
        with ledger.phase("update"):
            write(ledger, "all_gather", 1, torch.int8)
            raise ArithmeticError
    except ArithmeticError:
        write(ledger, "all_gather", 1, torch.int8)
    assert [key.phase for key in ledger.lines] == ["update", "backward"]


def test_since_gives_what_was_written_in_between():
    """Lines that did not change are left out, the others are differences."""
    ledger = Ledger()
    write(ledger, "all_gather", 3, torch.float32)
    write(ledger, "all_reduce", 3, torch.float32)
    before = ledger.copy()
    assert ledger.since(before) == {}
    write(ledger, "all_gather", 2, torch.float32)
    assert ledger.since(before) == {Key("dp", "all_gather", "start"): Tally(1, 2, 8, 1)}


def test_a_ledger_can_be_handed_to_another_process():
    """As what a rank returns from `sw.spawn`."""
    ledger = Ledger()
    write(ledger, "all_reduce", 5, torch.float32)
    again = pickle.loads(pickle.dumps(ledger))  # noqa: S301 (its own bytes)
    write(again, "all_reduce", 5, torch.float32)
    assert again.lines == {Key("dp", "all_reduce", "start"): Tally(2, 10, 40, 2)}
