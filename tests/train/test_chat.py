"""Conversations and documents: what the targets are, and what attends to what."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.comm.world import alone as world_of_one
from shardwise.core.errors import InputError
from shardwise.train.data import data, packed, sources, tokens
from shardwise.train.model import build
from shardwise.train.prepare import PreparedRun, RunStart, prepare
from tests.train import runs
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


# --- documents that are kept apart ----------------------------------------------------------------


def test_no_token_of_a_document_is_the_target_of_another():
    """Positions begin anew after a separator, whose target would be of the next document."""
    end = tokens.ByteVocabulary().separator
    stream = np.array([1, 2, end, 3, end, 4, 5, 6, end], np.uint16)
    made = packed.Packed("key", stream, 9, 3, tokens.ByteVocabulary(), (9,))
    rows = data.Corpus(made, 4, np.arange(2), np.arange(0)).rows(np.arange(2), documents=True)
    assert rows.inputs.tolist() == [[1, 2, end, 3], [end, 4, 5, 6]]
    assert rows.targets.tolist() == [[2, end, -100, end], [-100, 5, 6, end]]
    assert rows.positions is not None and rows.mask is not None
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert rows.mask[1, 0].tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, True],
    ]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        ("gpt", "cp2 zero1 fp64", 2),
        ("llama", "cp2:ulysses fp64", 2),
        ("gpt2", "pp2 gpipe:2 fp64", 2),
        ("gpt", "tp2 pp2 1f1b:2 fp64", 4),
        ("moe", "ep2 zero2 fp64", 2),
        ("llama", "tp2 sp zero3 fp64", 2),
    ],
)
def test_documents_in_a_row_are_as_rows_of_their_own(
    name: str, plan: str, ranks: int, tmp_path: Path
):
    """The loss of a step is the one of a row for each document; so it is under every plan."""
    at = tmp_path / "run"
    given = runs.settings(at, steps=2)
    if name in ("llama", "gpt2"):
        folder = runs.model_folder(name, tmp_path / name)
        given = runs.pretrained(at, folder, "fp64", steps=2)
    text = Path(given.data.source[0])
    for n, line in enumerate(["ab", "the sun", "of a", "x", "to be, or not", "seven"]):
        (text / f"{n}.txt").write_text(line)
    experts = {"experts": 4} if name == "moe" else {}
    given = runs.changed(runs.changed(given, "data", documents=True), "model", **experts)
    alone = runs.run(given)
    prepared = prepare(runs.changed(given, "run", folder=str(tmp_path / "loss")), 1, RunStart())
    first = prepared.corpus.rows(prepared.batches.numbers(0), documents=True)
    if name != "moe":  # whose gate counts the tokens of a batch
        assert alone[0].loss == pytest.approx(apart(prepared, first), rel=1e-9)
    other = runs.changed(runs.changed(given, "plan", text=plan), "run", folder=str(tmp_path / "2"))
    assert [r.loss for r in runs.run(other, ranks)] == pytest.approx(
        [r.loss for r in alone], rel=1e-9
    )


def apart(prepared: PreparedRun, rows: data.Rows) -> float:
    """The mean loss of the targets, each document in a row of its own."""
    model = build(prepared, world_of_one()).model
    total = count = 0
    assert rows.positions is not None
    for inputs, targets, positions in zip(rows.inputs, rows.targets, rows.positions, strict=True):
        for a, b in itertools.pairwise([*np.flatnonzero(positions == 0), len(inputs)]):
            if (n := int((targets[a:b] != data.IGNORED).sum())) > 0:
                part = {"inputs": inputs[None, a:b], "targets": targets[None, a:b]}
                batch = {key: torch.from_numpy(x) for key, x in part.items()}
                total, count = total + n * prepared.sizes.loss(model, batch).item(), count + n
    return total / count
