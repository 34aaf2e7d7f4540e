"""A schedule as text: what is written is read back, what users write is understood or answered."""

import pytest

from shardwise.core.errors import InputError
from shardwise.core.schedule.library import LIBRARY, build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.text import read, write
from shardwise.core.schedule.weight_stashing import two_buffered
from tests.core.schedule.sizes import sizes


@pytest.mark.parametrize("name", LIBRARY)
def test_text_round_trips(name: str):
    """A schedule is what its text says, bare and lowered."""
    for n in list(sizes(name))[::7]:
        schedule = LIBRARY[name].build(n)
        for value in (schedule, lower(schedule), lower(schedule, gather=not schedule.update)):
            assert read(write(value)) == value
            assert hash(read(write(value))) == hash(value)


def test_lags_round_trip():
    """What an asynchronous schedule says of its updates is part of its text."""
    text = write(two_buffered(2, 4, batches=2))
    assert text.startswith("home 0 1\nmicrobatches 8\nupdate 4\nlag 1 1\nrank 0  F0.0 F0.1")
    assert read(text) == two_buffered(2, 4, batches=2)


def test_the_short_form_is_understood():
    """Where each rank has one stage its number may be left out; remarks are skipped."""
    text = "# mine\n\nrank 1: F0 B0 F1 B1  # the last\nrank 0: F0 F1 B0 B1\n"
    assert read(text) == build("1f1b:2", 2)


def test_homes_follow_from_the_rows():
    """Without a line `home` a stage is at home where it is."""
    assert read("rank 0 F0.0 F3.0\nrank 1 F1.0 F2.0").home == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "a schedule without lines. Allowed: one line for each rank, from 0 up"),
        ("# a remark\n\n", "a schedule without lines"),
        ("home 0\n", "lines for the ranks (none)"),
        ("rank 1 F0 B0", "lines for the ranks 1"),
        ("rank 0 F0\nrank 0 B0", "lines for the ranks 0, 0"),
        ("microbatches\nrank 0 F0 B0", "the line 'microbatches'"),
        ("rnk 0 F0 B0", "the line 'rnk 0 F0 B0'"),
        (
            "home 0 x\nrank 0 F0 B0",
            "the line 'home 0 x' of a schedule. Allowed: home with",
        ),
        ("home 0\nhome 0\nrank 0 F0 B0", "the line 'home 0' of a schedule"),
        ("microbatches 2 3\nrank 0 F0 B0", "microbatches with one whole number, from 0 to 99999"),
        ("home" + " 0" * 9999 + " x\nrank 0 F0 B0", "0 0..."),
        ("rank 0 f0 B0", "Write instead: F0"),
        ("rank 0 F0 X0", "'X0' in a schedule"),
        ("rank 0 F0 SEND:act0.0<1", "SEND:act0.3>1"),
        ("rank 0 F0 F1.0 B0 B1.0", "'F0' on a rank of 2 stages"),
        ("rank 0 F99999999 B0", "'F99999999'"),
    ],
)
def test_what_cannot_be_read_is_answered(text: str, phrase: str):
    """A line or word that says nothing is named, with one that does."""
    with pytest.raises(InputError, match="Write instead: ") as refused:
        read(text)
    assert phrase in str(refused.value)
