"""Folders of models of transformers: on this machine, or downloaded from the Hugging Face Hub."""

import re
from importlib import import_module
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad, expanded, one_line

#: The files of a model to download: configuration and tokenizer, and its weights if needed.
TEXTS: Final = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS: Final = "*.safetensors"
#: The form of a model id on the Hub: `gpt2` or `org/model`.
_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def folder_of(name: str, *, weights: bool = False) -> Path:
    """Return the path of a model: the folder `name`, or the cached snapshot of a model of the Hub.

    `huggingface_hub` downloads the snapshot at its first use, with the weights if `weights` is set.
    Raises InputError if the Hub has no such model, or cannot be reached.
    """
    folder = Path(expanded(name))
    if folder.is_dir() or _ID.fullmatch(name) is None:
        return folder
    try:
        hub = import_module("huggingface_hub")  # of the extra `hf`
        files = [*TEXTS, *([WEIGHTS] if weights else [])]
        return Path(hub.snapshot_download(name, allow_patterns=files))
    except Exception as error:  # noqa: BLE001 (of the Hub, the network, the disk, an import)
        why = one_line(f"{type(error).__name__}: {error}")[:200]
        raise bad(
            f"the model 'hf:{name}', which is no folder here, and no model of the Hub ({why})",
            "a folder, or the id of a model of the Hub; toy:TYPE is a small random model",
            f"hf:./{name} or toy:{name.partition('/')[0]}",
        ) from None
