"""The configuration of a run: the keys of a TOML file, their defaults, and errors for wrong ones.

Every key has a default; an empty file is refused, since it is probably the wrong file. The error
for an unknown key names the nearest one. Values are not converted between types: true is not a
number, nor is "8". Nothing here imports torch, so a wrong file is answered at once.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from shardwise.core.errors import InputError, Problem, bad, read_text, refusal
from shardwise.core.tools.arguments import suggest
from shardwise.core.tools.hub import folder_of
from shardwise.train.config_sections import (
    CLOSED,
    DataSection,
    ModelSection,
    OffloadSection,
    PlanSection,
    RunSection,
    TrainSection,
)


class Config(BaseModel):
    """The configuration of a run."""

    model_config = CLOSED

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    plan: PlanSection = PlanSection()
    run: RunSection = RunSection()
    offload: OffloadSection = OffloadSection()

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    @property
    def cache(self) -> Path:
        """The folder of tokenised data; by default shared by runs in the same parent folder."""
        return Path(self.data.cache) if self.data.cache else self.folder.parent / "tokens"


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file `path`, and apply overrides of the form `section.key=value`."""
    values = dict[str, Any]()
    try:
        values = tomllib.loads(read_text(path))
        why = "" if values else "which is empty"
    except (OSError, UnicodeDecodeError) as error:
        why = f"which cannot be read ({getattr(error, 'strerror', None) or error})"
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        why = f"which is not TOML: {error}"
    if why:
        raise bad(
            f"the configuration {path}, {why}",
            'a TOML file: sections in brackets and lines key = value, text in "quotes"',
            "[train] and under it steps = 1000, for example",
        )
    return build(override(values, overrides), str(path))


def build(values: Mapping[str, Any], where: str = "the configuration") -> Config:
    """The configuration with these sections. Raises InputError that lists all problems."""
    try:
        config = with_tokenizer(Config.model_validate(values))
    except ValidationError as error:
        found = [_problem(dict(found), values) for found in reversed(error.errors())]
        first = {each.given: each for each in found}  # pydantic's later errors follow from it
        raise refusal(where, list(first.values())[::-1]) from None
    if config.train.warmup > config.train.steps:
        raise bad(
            f"train.warmup = {config.train.warmup} with train.steps = {config.train.steps}",
            "a warmup of at most train.steps",
            f"train.warmup = {config.train.steps // 10}",
        )
    sources, weights = config.data.source, config.data.weights
    if weights and len(weights) != len(sources):
        raise bad(
            f"data.weights of {len(weights)} numbers with {len(sources)} in data.source",
            "a weight for each source, or none",
            f"data.weights = {[1.0] * len(sources)}",
        )
    return config


def with_tokenizer(config: Config) -> Config:
    """Unless data.tokens is set, a model in a folder has the tokens of its tokenizer."""
    kind, _, name = config.model.name.partition(":")
    if kind != "hf" or "tokens" in config.data.model_fields_set:
        return config
    file = folder_of(name) / "tokenizer.json"
    if not file.is_file():
        return config
    data = config.data.model_copy(update={"tokens": str(file)})
    return config.model_copy(update={"data": data})


def override(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply each `section.key=value`; what is not TOML, or for a key of type text, is text."""
    merged = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            near = (f"--set {each}={value.strip() or 100}" for each in _nearest_keys(key.strip()))
            instead = " or ".join(near)
            raise bad(f"--set {text}", "section.key=value", instead)
        part = merged.setdefault(section, {})
        if isinstance(part, dict):
            part[name] = _value(value.strip(), isinstance(_default(section, name), str))
    return merged


def dump(config: Config) -> str:
    """The configuration as TOML, which reads back to the same value, without unset keys."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _value(text: str, only_text: bool) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = values.pop("value")
    return text if values or (only_text and not isinstance(value, str)) else value


def _problem(error: dict[str, Any], values: Mapping[str, Any]) -> Problem:
    section, *rest = (str(part) for part in error["loc"][:2])
    key = ".".join([section, *rest])
    if error["type"] == "extra_forbidden":
        names = _keys(section) if rest else list(Config.model_fields)
        instead = " or ".join(_nearest_keys(key))
        return Problem(f"the unknown key {key}", ", ".join(names), instead)
    given = values[section][rest[0]] if rest else values[section]
    text = json.dumps(given, default=str)
    default, cause = _default(section, *rest), error.get("ctx", {}).get("error")
    allowed = str(error["msg"]).removeprefix("Input should be ")
    allowed = cause.problems[0].allowed if isinstance(cause, InputError) else allowed
    return Problem(
        f"{key} = {text if len(text) < 80 else text[:77] + '...'}",
        allowed if rest else f"a section [{key}]",
        f"no {key}" if default is None else f"{key} = {json.dumps(default)}, its default",
    )


def _nearest_keys(key: str) -> list[str]:
    keys = [f"{part}.{each}" for part in Config.model_fields for each in _keys(part)]
    section, _, name = key.rpartition(".")
    same = [each for each in keys if each.endswith(f".{name}")]
    if same or section not in Config.model_fields:
        return same or [suggest(key, keys, 0.5) or "train.steps"]
    own = _keys(section)
    return [f"{section}.{suggest(name, own, 0.5) or next(iter(own))}"]


def _keys(section: str) -> list[str]:
    field = Config.model_fields.get(section)
    return list(type(field.default).model_fields) if field is not None else []


def _default(section: str, name: str = "") -> Any:
    return getattr(getattr(Config(), section, None), name, None)
