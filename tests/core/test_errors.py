"""The text of errors."""

from shardwise.core.errors import InputError, Problem, bad, refusal


def test_bad_is_one_paragraph():
    """An error says what was given, what is allowed and what to write instead, in one line."""
    error = bad("dp0.", "sizes from 1 up ", "dp2")
    assert isinstance(error, InputError)
    assert str(error) == "Given: dp0. Allowed: sizes from 1 up. Write instead: dp2."


def test_refusal_lists_every_problem():
    """One problem reads like `bad`; several are numbered under the name of what is wrong."""
    first, second = Problem("a", "b", "c"), Problem("d", "e", "f")
    assert str(refusal("it", [first])) == str(bad("a", "b", "c"))
    assert str(refusal("it", [first, second])).splitlines() == [
        "2 things are wrong with it.",
        f"1. {first}",
        f"2. {second}",
    ]
