"""The file of a cluster: a TOML table of prediction/cluster.py, read with clear problems."""

import json
import tomllib
from pathlib import Path
from typing import Any, Final

import tomli_w
from pydantic import ValidationError

from shardwise.core.errors import Problem, bad, expanded, read_text, refusal
from shardwise.core.tools.arguments import suggest
from shardwise.prediction.cluster import PRESETS, Cluster

_EXAMPLE: Final = "h100-sxm"


def cluster_of(name: str | Path) -> Cluster:
    """The preset of this name, or the cluster in the file.

    Raises InputError for neither, and one that lists all problems of a wrong file.
    """
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path, allowed = Path(expanded(str(name))), f"{', '.join(PRESETS)}, or the file of a cluster"
    near = suggest(str(name), PRESETS, 0.3) or _EXAMPLE
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        raise bad(f"the cluster '{name}' ({error.strerror})", allowed, near) from None
    except (ValueError, RecursionError) as error:  # 5000 brackets
        raise bad(f"the cluster {name}, which is not TOML: {error}", allowed, near) from None
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        problems = [_problem(dict(each)) for each in error.errors()]
        raise refusal(f"the cluster {name}", problems) from None


def text_of(cluster: Cluster) -> str:
    """The text of the file, which reads back to the same value."""
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))


def _problem(error: dict[str, Any]) -> Problem:
    """One of pydantic's errors, with the value of a preset as the remedy."""
    *outer, name = (str(part) for part in error["loc"])
    section: Any = PRESETS[_EXAMPLE].model_dump()
    for part in outer:
        section = section.get(part) or {}
    key = ".".join([*outer, name])
    if error["type"] == "extra_forbidden":
        near = suggest(name, section) or next(iter(section), key)
        return Problem(f"the unknown key {key} of a cluster", ", ".join(section), near)
    instead = json.dumps(section.get(name, 1e9))
    if section.get(name) and isinstance(section[name], dict):
        instead = f"[{key}] with {', '.join(section[name])}"
    else:
        instead = f"{key} = {instead}, as in {_EXAMPLE}"
    if error["type"] == "missing":
        return Problem(f"a cluster without {key}", "all keys but [disk] and [derating]", instead)
    given, allowed = json.dumps(error["input"], default=str)[:80], str(error["msg"])
    return Problem(f"{key} = {given}", allowed.removeprefix("Input should be "), instead)
