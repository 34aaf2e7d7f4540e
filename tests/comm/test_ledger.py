import pickle

from shardwise.comm.ledger import Key, Ledger, Tally


def test_lines_of_one_key_add_up():
    """Calls, elements and bytes of the same axis, kind and phase are one line."""
    ledger = Ledger()
    ledger.write("dp", "all_reduce", 10, 4)
    ledger.write("dp", "all_reduce", 5, 2)
    assert ledger.lines == {Key("dp", "all_reduce", "start"): Tally(2, 15, 50)}
    assert ledger.sent_bytes() == 50


def test_a_phase_lasts_for_its_block_even_if_it_raises():
    """Inside `phase` lines carry its name; afterwards the name before is back."""
    ledger = Ledger()
    ledger.now = "backward"
    try:
        with ledger.phase("update"):
            ledger.write("dp", "all_gather", 1, 1)
            raise ArithmeticError
    except ArithmeticError:
        ledger.write("dp", "all_gather", 1, 1)
    assert [key.phase for key in ledger.lines] == ["update", "backward"]


def test_since_gives_what_was_written_in_between():
    """Lines that did not change are left out, the others are differences."""
    ledger = Ledger()
    ledger.write("dp", "all_gather", 3, 4)
    ledger.write("tp", "all_reduce", 3, 4)
    before = ledger.copy()
    assert ledger.since(before) == {}
    ledger.write("dp", "all_gather", 2, 4)
    assert ledger.since(before) == {Key("dp", "all_gather", "start"): Tally(1, 2, 8)}


def test_a_ledger_can_be_handed_to_another_process():
    """As what a rank returns from `sw.spawn`."""
    ledger = Ledger()
    ledger.write("dp", "all_reduce", 5, 4)
    again = pickle.loads(pickle.dumps(ledger))  # noqa: S301 (its own bytes)
    again.write("dp", "all_reduce", 5, 4)
    assert again.lines == {Key("dp", "all_reduce", "start"): Tally(2, 10, 40)}
