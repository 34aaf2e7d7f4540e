"""The vocabularies: what they number, and that text comes back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.train import tokens

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "class A:\n    x = 'é €'\n",
    "import os, sys\n",
    "abcdefgh",
] * 20


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text: str) -> None:
    """Byte tokens lose nothing, whatever the text."""
    vocabulary = tokens.ByteVocabulary()
    numbers = vocabulary.encode(text)
    assert vocabulary.decode(numbers.tolist()) == text
    assert len(numbers) == len(text.encode())


def test_the_byte_separator_is_no_byte() -> None:
    """257 tokens: no text can contain the separator."""
    vocabulary = tokens.ByteVocabulary()
    assert (vocabulary.size, vocabulary.separator) == (257, 256)


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_trained_bpe_spells_any_text(text: str) -> None:
    """A BPE trained on little text still holds all bytes, so no text is unknown to it."""
    assert TRAINED.decode(TRAINED.encode(text).tolist()) == text


TRAINED = tokens.train_bpe(TEXTS, 300)


def test_a_trained_bpe_has_the_size_asked_for_and_shortens() -> None:
    """Training reaches the size given, and a word of the data is fewer tokens than bytes."""
    assert TRAINED.size == 300
    assert len(TRAINED.encode("return")) < len("return")


def test_a_saved_tokenizer_loads_to_the_same_vocabulary(tmp_path: Path) -> None:
    """The name holds a hash of the content, so equal names are equal vocabularies."""
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = tokens.load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.size) == (TRAINED.name, TRAINED.size)
    assert loaded.separator == TRAINED.separator


@pytest.mark.parametrize(
    "text", ["bpe:", "bpe:256", "bpe:many", "bpe:-3", "bpe:1048577", "bpe:" + "9" * 5000]
)
def test_a_bpe_that_cannot_hold_the_bytes_is_refused(text: str) -> None:
    """256 bytes and a separator are the least."""
    with pytest.raises(InputError, match="a whole number above 256"):
        tokens.bpe_size(text)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    """A missing file and a file of something else are named."""
    for name in ("tokenizer.json", "a" * 300):
        with pytest.raises(InputError, match="which does not exist"):
            tokens.load_tokenizer(tmp_path / name)
    with pytest.raises(InputError, match=r"which is a folder.*Write instead: tokens = 'bytes'"):
        tokens.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        tokens.load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"is a folder.*Write instead: .*/tokenizer\.json'"):
        tokens.load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    """Documents could not be kept apart."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))  # noqa: S106
    with pytest.raises(InputError, match="ends a document"):
        tokens.load_tokenizer(tmp_path / "t.json")


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    """256 rows cannot hold 257 tokens; 257 can.  Those of a folder cannot be changed."""
    tokens.check_fits(tokens.ByteVocabulary(), 257, "gpt:quickstart")
    with pytest.raises(InputError, match=r"model\.vocabulary = 257"):
        tokens.check_fits(tokens.ByteVocabulary(), 256, "gpt:quickstart")
    with pytest.raises(InputError, match=r"instead: data\.tokens = 'PATH/tokenizer\.json'"):
        tokens.check_fits(tokens.ByteVocabulary(), 256, "hf:./folder")
