"""Folders of models of transformers: on this machine, or downloaded from the Hugging Face Hub."""

import re
from importlib import import_module
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad, expanded, one_line

#: Of a model's files those that are read; weights beside them where they are needed.
TEXTS: Final = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS: Final = "*.safetensors"
#: What the id of a model of the Hub looks like: `gpt2` or `org/model`.
_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def folder_of(name: str, *, weights: bool = False) -> Path:
    """The folder `name`, or that of the model of the Hub with this id, as it is in the cache of
    `huggingface_hub`; it is downloaded at its first use, with or without `weights`.

    Raises InputError for an id that the Hub does not give.
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
