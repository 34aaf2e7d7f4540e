"""The text of errors."""

from pathlib import Path

import pytest

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.suggest import beside


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


def test_a_text_is_in_one_line():
    """A path may contain line ends."""
    assert (
        str(bad("a\nb\x1b[0m", "c", "d")) == "Given: a\\nb\\x1b[0m. Allowed: c. Write instead: d."
    )


@pytest.mark.parametrize("words", ["dp2 ", "xx "])
def test_a_mistake_made_often_is_said_once(words: str):
    """A plan of five thousand equal words."""
    with pytest.raises(InputError, match="Given: ") as caught:
        Plan.parse(words * 5000)
    assert str(caught.value).count(words.strip()) < 5 and "\n" not in str(caught.value)


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
