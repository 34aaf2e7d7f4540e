"""Vocabularies: from text to token numbers."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import bad, one_line, read_text
from shardwise.train.data.sources import CHAT, raw

if TYPE_CHECKING:
    import tokenizers

SEPARATOR = "<|document|>"
KNOWN_SEPARATORS = (SEPARATOR, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
BYTES = 256
MOST_TOKENS = 2**20  # several times the largest vocabulary in use
PIECE = 2**20
#: The bit of a number in a stream whose token is no target.
NO_TARGET: Final = 2**31

Numbers = NDArray[np.uint32]


class Vocabulary(Protocol):
    """Converts text to numbers in [0, size); `separator` ends every document."""

    @property
    def size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def name(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> list[Numbers]: ...


@dataclass(frozen=True)
class ByteVocabulary:
    """One token per byte, and the separator."""

    size: int = BYTES + 1
    separator: int = BYTES
    name: str = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """One number per byte of the file that an exact document comes from."""
        return [np.frombuffer(raw(text), dtype=np.uint8).astype(np.uint32) for text in texts]


class TokenizerVocabulary:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(
        self, tokenizer: "tokenizers.Tokenizer", where: str, end: str | None = None
    ) -> None:
        """`end` is the text of the token that ends a document, if its files say so."""
        self._tokenizer = tokenizer
        entries = tokenizer.get_vocab(with_added_tokens=True)
        found = [text for text in (end, *KNOWN_SEPARATORS) if text in entries]
        if not found:
            raise bad(
                f"{where}, which has no token that ends a document",
                f"an eos_token in tokenizer_config.json, or one of {', '.join(KNOWN_SEPARATORS)}",
                "tokens = 'bpe:4096', which trains one on the data",
            )
        # numbers may have gaps: the largest determines the size
        self.size = max(entries.values()) + 1
        self.separator_text = found[0]
        self.separator = entries[found[0]]
        text = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True)
        digest = hashlib.sha256((text + found[0]).encode()).hexdigest()
        self.name = f"tokenizer-{digest[:16]}"

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """On all cores; a text of more than `PIECE` characters in pieces that end with a line."""
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece for each in pieces for piece in each]
        found = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        ids = ([np.asarray(next(found).ids, np.uint32) for _ in each] for each in pieces)
        return [np.concatenate(each) for each in ids]

    def save(self, path: Path) -> None:
        path.write_text(self._tokenizer.to_str(), encoding="utf-8")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def load_tokenizer(path: Path) -> TokenizerVocabulary:
    """The vocabulary of a tokenizer.json. Raises InputError for a file that is not one."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise bad(
            f"tokens = '{path}', which cannot be read as a tokenizer.json ({error})",
            "'bytes', 'bpe:SIZE', or the path of a tokenizer.json",
            "tokens = 'bpe:4096', which trains one on the data",
        ) from None
    return TokenizerVocabulary(tokenizer, f"tokens = '{path}'", _end_of_sequence(path))


def _end_of_sequence(path: Path) -> str | None:
    """The `eos_token` in the tokenizer_config.json beside a tokenizer."""
    try:
        found = json.loads(read_text(path.with_name("tokenizer_config.json")))["eos_token"]
        found = found["content"] if isinstance(found, dict) else found
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


# --- conversations ------------------------------------------------------------------------------


class ChatVocabulary:
    """Conversations by the chat template of a tokenizer; the targets are what the assistant says.

    A document is the JSON of a list of messages, each with `role` and `content`.
    """

    def __init__(self, tokenizer: Any, base: TokenizerVocabulary) -> None:
        """`tokenizer` is one of transformers, with a template; `base` has its tokens."""
        self._tokenizer, self.size = tokenizer, base.size
        self.separator = base.separator | NO_TARGET
        digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
        self.name = f"chat-{digest[:16]}-{base.name}"

    def encode(self, texts: Sequence[str]) -> list[Numbers]:
        """The tokens that are no targets have `NO_TARGET` added."""
        rendered = [self._rendered(json.loads(text)) for text in texts]
        fast = self._tokenizer.backend_tokenizer
        every = fast.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        found = list[Numbers]()
        for encoding, (_, answers) in zip(every, rendered, strict=True):
            begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
            target = np.zeros(len(begins), bool)
            for start, end in answers:
                target |= (start <= begins) & (begins < end)
            ids = np.asarray(encoding.ids, np.uint32)
            found.append(np.where(target, ids, ids | np.uint32(NO_TARGET)))
        return found

    def _rendered(self, messages: list[Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where the answers in it begin and end, each with the end of its turn."""
        try:
            whole, answers = self._text(messages), list[tuple[int, int]]()
            for at, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                before = self._text(messages[:at], add_generation_prompt=True)
                after = self._text(messages[: at + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    raise ValueError("its template changes what stands before an answer")
                answers.append((len(before), len(after)))
        except Exception as error:  # noqa: BLE001 (jinja's, transformers', of a message's form)
            why = one_line(f"{type(error).__name__}: {error}")[:200]
            raise bad(
                f"a conversation {json.dumps(messages)[:100]} with the chat template ({why})",
                "messages that the template takes, each with a role and content",
                '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
            ) from None
        return whole, answers

    def _text(self, messages: list[Any], **how: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **how)


def chat_vocabulary(tokens: str) -> ChatVocabulary:
    """That of a tokenizer's folder. Raises InputError for one without a chat template."""
    path, found = Path(tokens).expanduser(), None
    if path.is_file():
        base = load_tokenizer(path)
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(path.parent)
        if found.chat_template and found.is_fast:
            return ChatVocabulary(found, base)
    raise bad(
        f"data.field = '{CHAT}' with data.tokens = '{tokens}', which has no chat template",
        "the tokenizer.json in a folder of transformers, whose tokenizer has a chat template",
        "model.name = 'hf:./FOLDER' of a model for conversations, or data.tokens = "
        "'FOLDER/tokenizer.json'",
    )


def bpe_size(text: str) -> int:
    """The SIZE of `bpe:SIZE`. Raises InputError for one that cannot hold all bytes."""
    digits = text.removeprefix("bpe:")
    size = int(digits) if re.fullmatch("[0-9]{1,9}", digits) else 0
    if not BYTES < size <= MOST_TOKENS:
        raise bad(
            f"tokens = '{text}'",
            f"bpe: and a whole number above {BYTES} (all bytes) and up to {MOST_TOKENS}",
            "tokens = 'bpe:4096'",
        )
    return size


def vocabulary_size(tokens: str) -> int:
    """The size of a vocabulary; of `bpe:SIZE` the SIZE, which little data may not reach."""
    if tokens == "bytes":
        return ByteVocabulary().size
    if tokens.startswith("bpe:"):
        return bpe_size(tokens)
    return load_tokenizer(Path(tokens).expanduser()).size


def train_bpe(documents: Iterable[str], size: int) -> TokenizerVocabulary:
    """A byte-level BPE (Sennrich et al., arXiv 1508.07909) of `size` tokens from the documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return TokenizerVocabulary(tokenizer, f"tokens = 'bpe:{size}'")


def check_fits(vocabulary: Vocabulary, rows: int, model: str) -> None:
    """Raise InputError unless a model with `rows` rows of embedding can hold the vocabulary."""
    if vocabulary.size > rows:
        given = f"model.vocabulary = {rows} for {vocabulary.name} tokens"
        allowed, instead = f"{vocabulary.size} or more", f"model.vocabulary = {vocabulary.size}"
        if model.startswith("hf:"):  # whose vocabulary is the folder's
            instead = "data.tokens = 'PATH/tokenizer.json', with which the model was trained"
        raise bad(given, allowed, instead)
