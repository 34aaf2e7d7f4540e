"""The configuration of a run: the keys of a TOML file, their defaults, and errors in plain words.

    [model]   sizes of the GPT         [plan]    how it is distributed
    [data]    text and tokens          [sample]  what is generated at the end
    [train]   steps, batch, optimizer  [run]     the folder
    [offload] the folder of states on a disk

Every key has a default; an empty file is refused, since it is probably the wrong file. The error
for an unknown key names the nearest one, and values are not converted between types: true is not a
number, nor is "8". Nothing here imports torch, so a wrong file is answered at once.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from shardwise.core.errors import Problem, bad, refusal
from shardwise.core.suggest import suggest
from shardwise.train.config_sections import (
    CLOSED,
    TRACKERS,
    DataSection,
    ModelSection,
    OffloadSection,
    PlanSection,
    RunSection,
    SampleSection,
    TrainSection,
)

MOST_CHARACTERS: Final = 2**20  # of a configuration


class Config(BaseModel):
    """The configuration of a run."""

    model_config = CLOSED

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    plan: PlanSection = PlanSection()
    sample: SampleSection = SampleSection()
    run: RunSection = RunSection()
    offload: OffloadSection = OffloadSection()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder)

    @property
    def cache(self) -> Path:
        """The folder of tokenised data; by default shared by runs in the same parent folder."""
        return Path(self.data.cache) if self.data.cache else self.folder.parent / "tokens"


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the TOML file `path`, and apply overrides of the form `section.key=value`.

    Raises InputError for a file that is missing, empty or not TOML, and for every wrong value.
    """
    if path == Path():
        raise bad(
            "no configuration: the name of the file is empty, or that of the folder itself ('.')",
            "the path of a TOML file",
            "shardwise train examples/quickstart.toml",
        )
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise bad(
            f"the configuration {path}, which cannot be read ({_reason(error)})",
            "a TOML file",
            "shardwise train examples/quickstart.toml",
        ) from None
    if len(text) > MOST_CHARACTERS:
        raise bad(
            f"the configuration {path}, which is longer than {MOST_CHARACTERS} characters",
            "a TOML file of a few dozen lines",
            "shardwise train examples/quickstart.toml",
        )
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        raise bad(
            f"the configuration {path}, which is not TOML: {error}",
            'sections in brackets and lines key = value, text in "quotes"',
            "[train] and under it steps = 1000, for example",
        ) from None
    if not values:
        raise bad(
            f"the configuration {path}, which is empty",
            "a TOML file with at least one key: every key has a default, but a file without any "
            "is more likely the wrong one",
            "[train] and under it steps = 1000, for example",
        )
    return build(override(values, overrides), str(path))


def build(values: Mapping[str, Any], where: str = "the configuration") -> Config:
    """The configuration with these sections. Raises InputError that lists all problems."""
    try:
        config = with_tokenizer(Config.model_validate(values))
    except ValidationError as error:
        found = [_problem(dict(found), values) for found in error.errors()]
        raise refusal(where, list(dict.fromkeys(found))) from None
    if config.train.warmup > config.train.steps:
        raise bad(
            f"train.warmup = {config.train.warmup} with train.steps = {config.train.steps}",
            "a warmup of at most train.steps",
            f"train.warmup = {config.train.steps // 10}",
        )
    return config


def with_tokenizer(config: Config) -> Config:
    """The configuration whose tokens, if it does not say them, are those of the model's folder."""
    kind, _, path = config.model.name.partition(":")
    file = Path(path) / "tokenizer.json"
    if kind != "hf" or "tokens" in config.data.model_fields_set or not file.is_file():
        return config
    data = config.data.model_copy(update={"tokens": str(file)})
    return config.model_copy(update={"data": data})


def override(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply each `section.key=value` to `values`.

    A value that is not TOML is taken as text, as is any value of a key of type text.
    """
    merged = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            instead = (
                _with_section(key.strip(), value.strip()) if equals else "--set train.steps=100"
            )
            raise bad(f"--set {text}", "section.key=value", instead)
        part = merged.setdefault(section, {})
        if isinstance(part, dict):
            part[name] = _value(value.strip(), _takes_text(section, name))
    return merged


def _with_section(key: str, value: str) -> str:
    """The override that was probably meant by `key=value` without a section, or an example."""
    if key in Config.model_fields:  # a section without a key
        return f"--set {key}.{next(iter(_fields(key)))}={value}, for example"
    full = [f"{part}.{name}" for part in Config.model_fields for name in _fields(part)]
    named = [name for name in full if name.partition(".")[2] == key]
    if not named:
        names = {name.partition(".")[2]: name for name in full}
        close = suggest(key, names, 0.6)
        named = [names[close]] if close else []
    if not named:
        return "--set train.steps=100, for example"
    return " or ".join(f"--set {name}={value}" for name in named)


def dump(config: Config) -> str:
    """The configuration as TOML that reads back to the same value, without unset keys."""
    parts = []
    for section, values in config.model_dump().items():
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's, except for the character 127
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value)


def _value(text: str, only_text: bool = False) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = values.pop("value")
    return text if values or (only_text and not isinstance(value, str)) else value


def _takes_text(section: str, name: str) -> bool:
    field = _fields(section).get(name)
    return field is not None and isinstance(field.default, str)


def _problem(found: dict[str, Any], values: Mapping[str, Any]) -> Problem:
    """Convert one of pydantic's errors."""
    path = [str(part) for part in found["loc"]]
    key, given = ".".join(path), found["input"]
    if len(path) > 2:  # an item of a list: show the whole list
        section, name = path[:2]
        key, given = f"{section}.{name}", values[section][name]
    if found["type"] == "extra_forbidden":
        return _unknown_key(path)
    if found["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(f"{key} = {given!r}", f"a section [{key}] of keys", f"[{key}]")
    remedy = _in_right_type(path, given)
    instead = f"{key} = {_toml(remedy)}" if remedy is not None else f"leave {key} out"
    allowed = _LISTS.get(key) or _expectation(found)
    return Problem(f"{key} = {_short_json(given)}", allowed, instead)


def _in_right_type(path: Sequence[str], given: Any) -> Any:
    """The same value in the right type (8 for "8" and for 8.0); else the default."""
    found = [_value(given)] if isinstance(given, str) else [str(given)]
    found += [int(given)] if isinstance(given, float) and given.is_integer() else []
    for value in found if len(path) == 2 else ():
        try:
            Config.model_validate({path[0]: {path[1]: value}})
        except ValidationError:
            continue
        return value
    return _default(path)


def _expectation(found: dict[str, Any]) -> str:
    """The range or type that pydantic expects, without its 'Input should be'."""
    message = str(found["msg"])
    for opening in ("Input should be ", "Value should be ", "String should have "):
        message = message.removeprefix(opening)
    return _WORDS.get(str(found["type"]), message)


#: What the keys whose values are lists allow.
_LISTS: Final = {
    "train.betas": "two numbers in brackets, each from 0 up and below 1",
    "run.trackers": f"a list of {', '.join(TRACKERS)}",
    "run.callbacks": "a list of functions in files: file.py:function",
}
#: Plain words for kinds of pydantic's errors.
_WORDS: Final = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "string_too_short": "some text",
    "string_type": "text in quotes",
    "string_unicode": "text in UTF-8",
    "string_pattern_mismatch": "text without the character NUL",
}


def _unknown_key(path: list[str]) -> Problem:
    parent = Config.model_fields if len(path) == 1 else _fields(path[0])
    names = list(parent)
    close = suggest(path[-1], names, 0.5)
    elsewhere = [f"{part}.{path[-1]}" for part in Config.model_fields if path[-1] in _fields(part)]
    where = f"in [{path[0]}]" if len(path) > 1 else "as sections"
    if elsewhere:
        instead = elsewhere[0]
    elif close:
        instead = ".".join([*path[:-1], close])
    else:
        instead = f"leave {path[-1]} out"
    return Problem(f"the unknown key {'.'.join(path)}", f"{where}: {', '.join(names)}", instead)


def _fields(section: str) -> dict[str, Any]:
    field = Config.model_fields.get(section)
    return dict(type(field.default).model_fields) if field is not None else {}


def _default(path: Sequence[str]) -> Any:
    field = _fields(path[0]).get(path[1]) if len(path) > 1 else None
    return field.default if field is not None else None


def _short_json(given: Any) -> str:
    text = json.dumps(given, default=str)
    return text if len(text) < 80 else text[:77] + "..."


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
