"""Reads another system's file, and recognises the system."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwise.core.errors import bad
from shardwise.migrate import accelerate, deepspeed, torchtitan
from shardwise.migrate.draft import Draft, carry
from shardwise.train.config import MOST_CHARACTERS, build

_ALLOWED: Final = "DeepSpeed's JSON, accelerate's YAML, torchtitan's TOML"
_EXAMPLE: Final = "shardwise plan --from ds_config.json"
_ENDINGS: Final = {".json": deepspeed, ".yaml": accelerate, ".yml": accelerate, ".toml": torchtitan}


def imported(path: Path) -> tuple[Draft, str]:
    """The contents of the file, and the name of the system it is for.

    Raises InputError for a file that does not exist, cannot be read, or is of no known system.
    """
    project = _ENDINGS.get(path.suffix.lower())
    if project is None:
        raise bad(f"--from {path}", f"a file of {_ALLOWED}", _EXAMPLE)
    values = parsed(path)
    known = {name.partition(".")[0] for name in project.RULES}
    if not known & set(values):
        given = f"--from {path}, without a key of {project.PROJECT}"
        raise bad(given, f"a configuration: {_ALLOWED}", _EXAMPLE)
    draft = Draft()
    if project is accelerate:
        values = _with_deepspeed(draft, values, path)
    carry(draft, project.RULES, values, project.PROJECT)
    _settle(draft)
    return draft, project.PROJECT


def _with_deepspeed(draft: Draft, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Carry over the JSON that a YAML of accelerate names, if the file exists."""
    section = values.get("deepspeed_config")
    name = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    file = path.parent / name if isinstance(name, str) else None
    if not isinstance(section, dict) or file is None or not file.is_file():
        return values
    carry(draft, deepspeed.RULES, parsed(file), deepspeed.PROJECT)
    rest = {key: value for key, value in section.items() if key != "deepspeed_config_file"}
    return values | {"deepspeed_config": rest}


def _settle(draft: Draft) -> None:
    """Leave out values that `shardwise train` does not accept, with the reason."""
    for section, values in list(draft.values.items()):
        for name, value in list(values.items()):
            try:
                build({section: {name: value}} | _room(section, name, value))
            except ValueError as error:
                del values[name]
                reason = str(error).partition("Allowed: ")[2].partition(". Write")[0]
                draft.left.append((f"{section}.{name}", value, f"allowed here: {reason}"))
        if not values:
            del draft.values[section]
    steps, warmup = (draft.values.get("train", {}).get(name) for name in ("steps", "warmup"))
    if warmup is not None and warmup > (steps or 1000):
        del draft.values["train"]["warmup"]
        draft.left.append(("train.warmup", warmup, "a warmup is at most train.steps"))


def _room(section: str, name: str, value: Any) -> dict[str, Any]:
    """For a warmup, a large enough number of steps; the real number is checked at the end."""
    if (section, name) == ("train", "warmup") and isinstance(value, int):
        return {"train": {"warmup": value, "steps": max(value, 1)}}
    return {}


def parsed(path: Path) -> dict[str, Any]:
    """The values in a file, by its ending."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise bad(f"--from {path}, which cannot be read ({reason})", _ALLOWED, _EXAMPLE) from None
    try:
        values = _loaded(path, text)
    except (ValueError, RecursionError) as error:
        first = " ".join(str(error).split())
        raise bad(f"--from {path}, which is broken: {first}", _ALLOWED, _EXAMPLE) from None
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise bad(f"--from {path}, which holds no keys", _ALLOWED, _EXAMPLE)
    return dict(values)


def _loaded(path: Path, text: str) -> Any:
    match path.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
    try:
        import yaml
    except ImportError:
        given = f"--from {path}, without the package PyYAML"
        raise bad(given, "YAML with PyYAML installed", "pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
