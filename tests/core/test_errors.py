"""The text of errors."""

from pathlib import Path

import pytest

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.plan import Plan
from shardwise.core.suggest import beside


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


def test_a_text_is_short_and_in_one_line():
    """A path may contain line ends, and one mistake may be made five thousand times."""
    assert (
        str(bad("a\nb\x1b[0m", "c", "d")) == "Given: a\\nb\\x1b[0m. Allowed: c. Write instead: d."
    )
    assert len(str(bad("x" * 10**6, "c", "d"))) < 9000
    with pytest.raises(InputError) as caught:
        Plan.parse(" ".join(f"dp{n}" for n in range(1, 5001)))
    lines = str(caught.value).splitlines()
    assert lines[-1] == "And 4979 more." and len(lines) == 22
    assert sum(map(len, lines)) < 100_000


@pytest.mark.parametrize("words", ["dp2 ", "xx "])
def test_a_mistake_made_often_is_said_once(words: str):
    """A plan of five thousand equal words."""
    with pytest.raises(InputError, match="Given: ") as caught:
        Plan.parse(words * 5000)
    assert str(caught.value).count(words.strip()) < 5 and "\n" not in str(caught.value)


def test_of_many_unknown_words_the_first_are_named():
    """A text that is no plan."""
    with pytest.raises(InputError, match="'w19' and 4980 more, which are no plan words"):
        Plan.parse(" ".join(f"w{n}" for n in range(5000)))


@pytest.mark.parametrize(
    ("path", "other"), [("runs/a", "runs/a-2"), (".", "here-2"), ("../here", "../here-2")]
)
def test_another_name_is_beside_the_first(
    path: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also for the folder one is in, which has no name of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    expected = tmp_path / other if path == "." else Path(other)
    assert beside(Path(path)) == expected
