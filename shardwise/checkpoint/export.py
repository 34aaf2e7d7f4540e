"""Weights of a checkpoint as safetensors with the model's own names, and back.

Export reads one tensor at a time and holds one file of at most `file_bytes`. Import copies pieces.
A tied tensor is written under its first name; the others are in the file's header, where
`safetensors.torch.load_model` reads them, and transformers ties weights by itself.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardwise.checkpoint.folder import (
    CHECKPOINTS,
    TOKENIZER,
    TOKENIZER_FILES,
    all_in,
    find,
    is_whole,
    of_run,
    remove,
)
from shardwise.checkpoint.lock import RUN_LOCK
from shardwise.checkpoint.open_checkpoint import (
    IMPORTED,
    MODEL,
    OpenCheckpoint,
    open_checkpoint,
    read_piece,
    require_content,
)
from shardwise.checkpoint.save import save
from shardwise.checkpoint.weights_folder import (
    CONFIG,
    GENERATION,
    INDEX,
    WeightsFolder,
    new_folder,
    open_weights,
    writing,
)
from shardwise.comm.world import alone
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import beside
from shardwise.engine.state.box import Box, block

BUFFER: Final = "buffer/"
#: The most bytes of tensors in one file, as Hugging Face's default.
FILE_BYTES: Final = 5 * 10**9
#: Of peft: the prefix of names, and the files of adapters.
PEFT: Final = "base_model.model."
ADAPTERS, ADAPTERS_CONFIG = "adapter_model{suffix}.safetensors", "adapter_config.json"
#: The files that an export writes.
FILES: Final = (
    *("model*.safetensors", "adapter_model*.safetensors", INDEX),
    *(CONFIG, ADAPTERS_CONFIG, GENERATION),
    *TOKENIZER_FILES,
)


@dataclass(frozen=True)
class Exported:
    """The tensors, their bytes, files of tensors, and the names of other written files."""

    path: Path
    tensors: int
    bytes: int
    files: int
    others: list[str]


def export(
    run: Path,
    to: Path,
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the weights of the newest checkpoint in `run` into the folder `to`; of a model with
    adapters of peft, those alone.
    Floating-point weights keep the dtype of the checkpoint (fp32 masters for 16-bit training)
    unless `dtype` is given.
    """
    opened = open_checkpoint(find(of_run(run)))
    require_content(opened)
    model: dict[str, Any] = opened.scalars.get("model") or {}  # `described` in save.py
    names = _names(opened, model)
    adapters, pattern = model.get("adapters"), "model{suffix}.safetensors"
    if adapters:
        own = {name: key for name, key in names.items() if ".default." in name}
        names = {PEFT + n.removeprefix(PEFT).replace(".default.", "."): own[n] for n in own}
        model, pattern = {}, ADAPTERS
    empty = {
        name: torch.empty(_saved(opened, key).size, dtype=_dtype(opened, key, dtype), device="meta")
        for name, key in names.items()
    }
    split = split_torch_state_dict_into_shards(
        empty, filename_pattern=pattern, max_shard_size=file_bytes
    )
    header = {"format": "pt"} | {
        other: group[0] for group in model.get("tied", ()) for other in group[1:]
    }
    with new_folder(to, FILES, overwrite=overwrite) as folder:
        for file, group in split.filename_to_tensors.items():
            tensors = {n: _tensor(opened, names[n], dtype) for n in group}
            save_file(tensors, folder / file, header)
            del tensors
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            _write(folder / INDEX, index)
        config = model.get("config")
        config = None if config is None else _in_dtype(config, opened, names, dtype)
        files = {CONFIG: config, GENERATION: model.get("generation"), ADAPTERS_CONFIG: adapters}
        others = [name for name, content in files.items() if content]
        for name in others:
            _write(folder / name, files[name])
        others += _copy_tokenizer(opened.path, folder)
    total = split.metadata["total_size"]
    return Exported(to, len(names), total, len(split.filename_to_tensors), others)


def _copy_tokenizer(checkpoint: Path, folder: Path) -> list[str]:
    checkpoints = checkpoint.absolute().parent
    files = [checkpoints.parent / TOKENIZER / name for name in TOKENIZER_FILES]
    found = [file for file in files if checkpoints.name == CHECKPOINTS and file.is_file()]
    return [shutil.copyfile(file, folder / file.name).name for file in found]


def import_weights(folder: Path, run: Path, *, overwrite: bool = False) -> Path:
    """Write the weights in `folder` as the checkpoint of step 0 of the run in `run`; its path.
    `sw.load` and `shardwise train --resume` begin with these weights, under any plan.
    Raises InputError if `folder` has no weights, or weights of single experts that transformers
    joins, or if `run` has a checkpoint without `overwrite`, or a run or another import writes in
    it; RunError for a full disk.
    """
    weights = open_weights(folder)
    _require_own_names(weights)
    checkpoints = run / CHECKPOINTS
    tensors = {name: weights.tensor(name) for name in weights.files}  # mapped, not read
    boxes = [Box.full(f"{MODEL}{name}", t) for name, t in tensors.items()]
    scalars = {"step": 0, IMPORTED: str(folder.absolute()), "model": {"config": weights.config}}
    with writing(run, run / RUN_LOCK):
        _require_new(run, overwrite=overwrite)
        written = save(checkpoints, boxes, scalars, alone())
        for path in all_in(checkpoints):
            if path != written:
                remove(path)
    return written


def _require_new(run: Path, *, overwrite: bool) -> None:
    checkpoints = run / CHECKPOINTS
    there = all_in(checkpoints) if checkpoints.is_dir() else []
    if (there and not overwrite) or is_whole(run):
        raise bad(
            f"the run '{run}', which has the checkpoint {(there or [run])[-1].name}",
            "a new run, or one whose checkpoints --overwrite may remove",
            f"--to {beside(run)}",
        )


def _require_own_names(weights: WeightsFolder) -> None:
    """Raise InputError for a model whose single experts transformers renames and stacks."""
    single = [name for name in weights.names if re.search(r"\.experts\.\d+\.", name)]
    config = weights.config or {}
    if single and "model_type" in config:
        raise bad(
            f"the folder '{weights.path}' of a {config['model_type']}, whose weights are of single "
            f"experts ({min(single)}), which transformers joins as it loads them",
            "folders with the names of the model's own parameters",
            f"shardwise train CONFIG.toml --model hf:{weights.path}",
        )


def _names(opened: OpenCheckpoint, model: Mapping[str, Any]) -> dict[str, str]:
    """The names to write, each with its tensor in the checkpoint."""
    first = {name: group[0] for group in model.get("tied", ()) for name in group}
    transient = set(model.get("transient", ()))
    found: dict[str, str] = {}
    for key in opened.metadata.state_dict_metadata:
        kind = next((kind for kind in (MODEL, BUFFER) if key.startswith(kind)), "")
        name = key.removeprefix(kind).replace("_orig_mod.", "")
        if kind and not (kind == BUFFER and name in transient):
            found.setdefault(first.get(name, name), key)
    if not found:
        raise bad(
            f"the checkpoint '{opened.path}', which has no weights",
            "a checkpoint of sw.save or shardwise train",
            "shardwise checkpoint inspect PATH, to see what it has",
        )
    return dict(sorted(found.items()))


def _saved(opened: OpenCheckpoint, key: str) -> TensorStorageMetadata:
    saved = opened.metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)  # open_checkpoint accepts no other
    return saved


def _dtype(opened: OpenCheckpoint, key: str, dtype: torch.dtype | None) -> torch.dtype:
    own = _saved(opened, key).properties.dtype
    return dtype if dtype is not None and own.is_floating_point else own


def _tensor(opened: OpenCheckpoint, key: str, dtype: torch.dtype | None) -> Tensor:
    found = torch.empty(_saved(opened, key).size, dtype=_dtype(opened, key, dtype), device="cpu")
    for chunk in _saved(opened, key).chunks:
        piece = read_piece(opened.pieces[MetadataIndex(key, chunk.offsets)])
        block(found, chunk.offsets, chunk.sizes).copy_(piece)
    return found


def _in_dtype(
    config: dict[str, Any],
    opened: OpenCheckpoint,
    names: Mapping[str, str],
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The configuration with the dtype of the weights, in which transformers loads them."""
    if "architectures" not in config:
        return config
    kinds: Iterator[torch.dtype] = (_dtype(opened, key, dtype) for key in names.values())
    text = str(next(kind for kind in kinds if kind.is_floating_point)).removeprefix("torch.")
    return {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": text}


def _write(file: Path, contents: dict[str, Any]) -> None:
    file.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
