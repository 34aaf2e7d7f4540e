from typing import Any

import pytest
import torch

from shardwise.core.errors import InputError
from shardwise.models.registry import find

pytest.importorskip("transformers")

#: Tied and untied, causal, masked and sequence-to-sequence, grouped heads, experts.
NAMES = ["gpt2", "llama", "bert", "mistral", "qwen3", "gemma2", "phi3", "t5", "opt", "mixtral"]


@pytest.mark.parametrize("name", NAMES)
def test_a_models_gradients_add_up_in_fp64(name: str) -> None:
    """The gradient of a batch is the token-weighted sum of its halves' to 1e-11.

    So there is no dropout, no fp32 inside, and the loss is a mean over tokens: parity is defined.
    """
    found = find(f"hf:{name}")
    whole, parts = found.build().double(), found.build().double()
    batch = found.batch(4, seed=1)
    found.loss(whole, batch).backward()
    assert found.tokens is not None
    for rows in (slice(0, 2), slice(2, 4)):
        half = {key: value[rows] for key, value in batch.items()}
        (found.loss(parts, half) * found.tokens(half) / found.tokens(batch)).backward()
    for (key, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, key
        assert p.grad.dtype == torch.float64
        # a bias before a softmax has no gradient but rounding
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("llama", False), ("t5", True)])
def test_embeddings_are_tied_as_the_type_has_them(name: str, tied: bool) -> None:
    """Shrinking a model keeps what its type shares."""
    model: Any = find(f"hf:{name}").build()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_models_are_small() -> None:
    """Two layers and a small vocabulary whatever the published size: quick to prove on."""
    found = find("hf:llama")
    model: Any = found.build()
    assert sum(p.numel() for p in model.parameters()) < 200_000
    assert found.loss(model, found.make_batch(2, 0)).item() == pytest.approx(4.85, abs=0.3)


def test_hf_without_a_name_is_answered() -> None:
    """With a type that people know, and not the first of the list."""
    with pytest.raises(InputError, match="Write instead: hf:gpt2 or hf:llama"):
        find("hf:")


@pytest.mark.parametrize(("name", "nearest"), [("llamma", "llama"), ("vit", "git")])
def test_an_unknown_type_gets_the_nearest(name: str, nearest: str) -> None:
    """A type transformers has no language model for is answered with those that look like it."""
    with pytest.raises(InputError, match=nearest):
        find(f"hf:{name}")


def test_a_type_that_cannot_be_shrunk_says_so() -> None:
    """Where the small configuration does not give a model that runs, the reason is told."""
    with pytest.raises(InputError, match=r"whose small configuration gives"):
        find("hf:deepseek_v2").build()
