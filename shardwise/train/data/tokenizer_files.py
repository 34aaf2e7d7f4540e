"""The tokenizer of a run, which is kept in the run's folder for `checkpoint export`.

RUN/tokenizer/tokenizer.json           as it was when the run began
              tokenizer_config.json    beside it, or the few lines that transformers needs
"""

import json
import shutil
from pathlib import Path

from shardwise.checkpoint.folder import TOKENIZER, TOKENIZER_FILES
from shardwise.train.config import Config
from shardwise.train.data.packed import unwritable_folder
from shardwise.train.data.tokens import TokenizerVocabulary, Vocabulary
from shardwise.train.publish import publish

FILE, ABOUT = "tokenizer.json", "tokenizer_config.json"


def keep(config: Config, vocabulary: Vocabulary) -> None:
    """Write the tokenizer into the run's folder; none for tokens that are bytes.  Rank 0 calls it.

    Raises InputError if the folder cannot be written.
    """
    if not isinstance(vocabulary, TokenizerVocabulary):
        return
    to, beside = config.folder / TOKENIZER, Path(config.data.tokens).expanduser().parent
    try:
        to.mkdir(exist_ok=True)
        publish(to / FILE, vocabulary.save)
        trained = config.data.tokens.startswith("bpe:")
        for name in TOKENIZER_FILES if not trained else ():
            if name != FILE and (beside / name).is_file():
                publish(to / name, lambda path, name=name: shutil.copyfile(beside / name, path))
        if not (to / ABOUT).exists():
            about = json.dumps(_about(vocabulary), indent=2)
            publish(to / ABOUT, lambda path: path.write_text(about, encoding="utf-8"))
    except OSError as error:
        raise unwritable_folder(config.folder, "run.folder", error) from None


def _about(vocabulary: TokenizerVocabulary) -> dict[str, object]:
    """What transformers needs besides tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": vocabulary.separator_text,
        "clean_up_tokenization_spaces": False,
    }
