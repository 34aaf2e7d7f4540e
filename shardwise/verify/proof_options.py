"""The options of a proof besides the plan: units, and the table of tensor parallelism."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardwise.core.errors import InputError, bad, read_text
from shardwise.observe.work import Kernels
from shardwise.techniques.data.wrap_policy import Rule
from shardwise.techniques.tensor.tensor_table import Table

#: Keys that a file may have in addition to its styles, as in Table.of.
BESIDE: Final = ("heads", "kv_heads", "sequence", "sets", "derived")
EXAMPLE: Final = '"blocks.*.up" = "colwise" and "blocks.*.down" = "rowwise", one a line (TOML)'


@dataclass(frozen=True)
class Options:
    """The options of parallelize besides the plan. Each block is a unit, also in small models,
    unless the plan has a bucket. `kernels`: the device's. `batches` selects another set.
    """

    units: Rule = "auto"
    table: Table | Mapping[str, str] | None = None
    kernels: Kernels = "cpu"
    batches: int = 0


def table_in(path: Path, option: str = "--table") -> Table:
    """The table in a TOML or JSON file: patterns to styles, under `styles` beside other keys of
    Table.of. `option` named the file.
    """
    try:
        text = read_text(path)
        read = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise bad(f"{option} {path} ({error})", "a TOML or JSON file of styles", EXAMPLE) from None
    if not isinstance(read, dict) or not read:
        raise bad(f"{option} {path}, which has no styles", "patterns and their styles", EXAMPLE)
    try:
        return _table(read)
    except InputError as error:
        raise InputError(f"In {path}: {error}") from None


def _table(read: dict[str, Any]) -> Table:
    if "styles" not in read or not isinstance(read["styles"], dict):
        nested = next((name for name, style in read.items() if isinstance(style, dict)), None)
        if nested is not None:
            allowed = "names in quotes where they have dots; heads and sequence beside [styles]"
            raise bad(f"the name {nested} that holds other names", allowed, EXAMPLE)
        return Table.of(read)
    unknown = [name for name in read if name not in ("styles", *BESIDE)]
    if unknown:
        raise bad(f"{unknown[0]} beside styles", ", ".join(BESIDE), "a file of styles alone")
    return Table.of(**read)
