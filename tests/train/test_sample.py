"""The sample: deterministic, within the vocabulary, within the window."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import one_hot

from shardwise.comm.world import alone
from shardwise.train import end, loop
from shardwise.train import sample as sampling
from shardwise.train.config_sections import SampleSection
from shardwise.train.data.tokens import ByteVocabulary
from shardwise.train.sample import visible
from tests.train import runs

BYTES = ByteVocabulary()


class Counting:
    """Says that the next token is one more than the last."""

    def __init__(self) -> None:
        self.longest = 0
        self.passes = 0

    def __call__(self, seen: Sequence[int]) -> Tensor:
        self.longest = max(self.longest, len(seen))
        self.passes += 1
        return 50.0 * one_hot(torch.tensor((seen[-1] + 1) % BYTES.size), BYTES.size)


def test_the_likeliest_tokens_continue_the_prompt() -> None:
    """At temperature 0 a model that counts, counts on."""
    how = SampleSection(tokens=4, prompt="a", temperature=0.0)
    assert sampling.sample(Counting(), BYTES, 8, how, seed=0) == "abcde"


def test_the_model_sees_no_more_than_its_window_and_runs_once_a_token() -> None:
    """The number of passes is the number of tokens, so that ranks stay together."""
    model = Counting()
    how = SampleSection(tokens=9, prompt="abcdef", temperature=0.5)
    sampling.sample(model, BYTES, 5, how, seed=0)
    assert (model.longest, model.passes) == (5, 9)


def test_the_same_seed_draws_the_same_text_and_another_does_not() -> None:
    """The draw hangs on the seed alone."""

    def even(_: Sequence[int]) -> Tensor:
        return torch.zeros(BYTES.size)

    how = SampleSection(tokens=40, temperature=1.0, top_k=0)
    texts = [sampling.sample(even, BYTES, 8, how, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_draws_among_the_k_likeliest() -> None:
    """With top_k = 2 over four tokens, the two least likely never come."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 1.0, 3.1])
    assert {sampling.draw(logits, 5.0, 2, generator) for _ in range(200)} == {1, 3}
    assert {sampling.draw(logits, 5.0, 0, generator) for _ in range(400)} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-45, 1e-300, 1e-320])
def test_a_temperature_near_zero_draws_the_likeliest(temperature: float) -> None:
    """However near: no share is infinite, and none is no number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 30.0, -1e30, 31.0])
    assert {sampling.draw(logits, temperature, 2, generator) for _ in range(20)} == {3}
    assert {sampling.draw(logits, temperature, 0, generator) for _ in range(20)} == {3}


def test_what_a_terminal_would_obey_is_escaped() -> None:
    """Control characters and line ends of other kinds; what people write stays."""
    assert visible("a\rb\x1b[2J\tc\n\x85é\u2028") == "a\\rb\\x1b[2J\tc\n\\x85é\\u2028"


def test_the_screen_shows_the_sample_that_is_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A carriage return is seen as such on the screen, in sample.txt and in report.md."""
    monkeypatch.setattr(end, "sample", lambda *_: "left\rright")
    given = runs.settings(tmp_path / "run", steps=1, warmup=0)
    said = io.StringIO()
    loop.train(given, alone(), console=Console(file=said, width=80))
    written = [(given.folder / name).read_text() for name in ("sample.txt", "report.md")]
    assert all("left\\rright" in text for text in (said.getvalue(), *written))
