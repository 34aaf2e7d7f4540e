"""Conversations: the chat template makes text of them, and answers are the targets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.core.errors import InputError
from shardwise.train.data import data, packed, sources, tokens
from tests.train.test_data import TRAINED

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</end>{% endgeneration %}{% else %}{{ m.content }}</end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=TRAINED._tokenizer, chat_template=template, eos_token=tokens.SEPARATOR
    )


def test_the_targets_of_a_conversation_are_its_answers(tmp_path: Path):
    """They are those that transformers finds in a template that marks them, and no others."""
    chat_tokenizer().save_pretrained(tmp_path)
    said = [("system", "be short"), ("user", "é or e?"), ("assistant", "é, of course")]
    said += [("user", "why"), ("assistant", "because")]
    talks = [[{"role": r, "content": c} for r, c in said[:n]] for n in (5, 3, 2)]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk, "n": 1}) + "\n" for talk in talks))
    source = sources.find(str(file), sources.CHAT)
    made = packed.tokenise([source], str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    rows = data.Corpus(made, len(made.stream) - 1, np.arange(1), np.arange(0)).rows(np.arange(1))
    known = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    wanted: list[tuple[int, bool]] = []
    for talk in talks:
        found = known.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
        )
        wanted += zip(found["input_ids"], found["assistant_masks"], strict=True)
        wanted.append((TRAINED.separator, False))
    assert rows.inputs[0].tolist() == [number for number, _ in wanted[:-1]]
    assert rows.targets[0].tolist() == [n if answer else -100 for n, answer in wanted[1:]]
    assert 5 < sum(answer for _, answer in wanted) < len(wanted) / 2


@pytest.mark.parametrize(
    ("rows", "phrase"),
    [
        ([{"messages": "text"}], "whose documents are all empty"),
        ([{"messages": [{"role": "assistant"}]}], "a conversation .* with the chat template"),
    ],
)
def test_a_conversation_of_another_form_is_refused(rows: Any, phrase: str, tmp_path: Path):
    """In a paragraph, as is a tokenizer without a template."""
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, at = [sources.find(str(file), sources.CHAT)], str(tmp_path / "tokenizer.json")
    chat_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="which has no chat template"):
        packed.tokenise(source, at, tmp_path / "cache")
    chat_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=phrase):
        packed.tokenise(source, at, tmp_path / "cache")
