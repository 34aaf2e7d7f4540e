"""The sample: deterministic, within the vocabulary, within the window."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.train import sample as sampling
from shardwise.train.config import SampleSection
from shardwise.train.tokens import ByteVocabulary

BYTES = ByteVocabulary()


class Counting(nn.Module):
    """Says of every position that the next token is one more; has more rows than tokens."""

    def __init__(self, rows: int = 300) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.longest = 0
        self.passes = 0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens_BT.shape[1])
        self.passes += 1
        rows = self.embed.num_embeddings
        return 50.0 * nn.functional.one_hot((tokens_BT + 1) % rows, rows)


def test_the_likeliest_tokens_continue_the_prompt() -> None:
    """At temperature 0 a model that counts, counts on."""
    how = SampleSection(tokens=4, prompt="a", temperature=0.0)
    assert sampling.sample(Counting(), BYTES, 8, how, seed=0) == "abcde"


def test_the_model_sees_no_more_than_its_window_and_runs_once_a_token() -> None:
    """The number of passes is the number of tokens, so that ranks stay together."""
    model = Counting().train()
    how = SampleSection(tokens=9, prompt="abcdef", temperature=0.5)
    sampling.sample(model, BYTES, 5, how, seed=0)
    assert (model.longest, model.passes) == (5, 9)
    assert model.training


def test_the_same_seed_draws_the_same_text_and_another_does_not() -> None:
    """The draw hangs on the seed alone."""

    class Even(Counting):
        def forward(self, tokens_BT: Tensor) -> Tensor:
            return torch.zeros(*tokens_BT.shape, 300)

    how = SampleSection(tokens=40, temperature=1.0, top_k=0)
    texts = [sampling.sample(Even(), BYTES, 8, how, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_rows_beyond_the_vocabulary_are_never_drawn() -> None:
    """A model with 300 rows over 257 tokens, all for row 299: the text is of tokens that exist."""

    class Beyond(Counting):
        def forward(self, tokens_BT: Tensor) -> Tensor:
            return nn.functional.one_hot(torch.full(tokens_BT.shape, 299), 300) * 99.0

    how = SampleSection(tokens=30, temperature=1.0)
    sampling.sample(Beyond(), BYTES, 8, how, seed=0)  # decoding number 299 would fail


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
