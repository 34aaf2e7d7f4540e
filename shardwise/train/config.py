"""The configuration of a run: what a TOML file may say, its defaults, and its errors as sentences.

    [model]   sizes of the GPT         [plan]    how it is distributed
    [data]    text and tokens          [sample]  what is generated at the end
    [train]   steps, batch, optimizer  [run]     the folder

Every key has a default, so an empty file is a run. A key that does not exist is answered with the
nearest one that does. Nothing here needs torch: a bad file is answered at once.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.core.errors import Problem, bad, refusal

CLOSED: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(BaseModel):
    """[model]: a named size of the GPT; each size that is given here replaces the named one's."""

    model_config = CLOSED

    name: str = "quickstart"
    vocabulary: int | None = Field(default=None, ge=1)
    layers: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    hidden: int | None = Field(default=None, ge=1)
    sequence: int | None = Field(default=None, ge=1)
    tied: bool | None = None

    def sizes(self) -> dict[str, int | bool]:
        """The sizes that are given, by field of GPTConfig."""
        given = self.model_dump(exclude={"name"})
        return {name: value for name, value in given.items() if value is not None}


class DataSection(BaseModel):
    """[data]: where the text is and how it becomes tokens.

    `source` is "stdlib" or a path: a file (.txt, .jsonl, .parquet), a folder of them, a glob.
    `tokens` is "bytes", "bpe:SIZE" (trained on the data), or the path of a tokenizer.json.
    `validation` is the share of the sequences held out; `cache` holds the tokenised data, beside
    the run's folder where it is not given.
    """

    model_config = CLOSED

    source: str = Field(default="stdlib", min_length=1)
    field: str = Field(default="text", min_length=1)
    tokens: str = Field(default="bytes", min_length=1)
    validation: float = Field(default=0.05, gt=0, lt=1)
    cache: str | None = None


class TrainSection(BaseModel):
    """[train]: `batch` is the global batch in sequences, whatever the number of ranks.

    `warmup` counts steps; `final` is the share of `lr` that is left at the end of the decay;
    `clip` bounds the gradient's norm, 0 for none; `eval_every` and `save_every` count steps, 0 for
    the end only; `keep` is how many checkpoints are kept.
    """

    model_config = CLOSED

    steps: int = Field(default=1000, ge=1)
    batch: int = Field(default=16, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=50, ge=0)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, ge=0)
    seed: int = Field(default=0, ge=0)
    eval_every: int = Field(default=100, ge=0)
    eval_sequences: int = Field(default=64, ge=1)
    save_every: int = Field(default=200, ge=0)
    keep: int = Field(default=2, ge=1)


class PlanSection(BaseModel):
    """[plan]: `text` in plan words; "" for one rank."""

    model_config = CLOSED

    text: str = ""


class SampleSection(BaseModel):
    """[sample]: the text generated at the end; `tokens = 0` for none, `top_k = 0` for all."""

    model_config = CLOSED

    tokens: int = Field(default=240, ge=0)
    prompt: str = ""
    temperature: float = Field(default=0.8, ge=0)
    top_k: int = Field(default=40, ge=0)


class RunSection(BaseModel):
    """[run]: where everything the run leaves behind goes, and on which device it computes.

    `device = "auto"` is a GPU where every rank on the machine can have one, else the processor.
    """

    model_config = CLOSED

    folder: str = Field(default="runs/default", min_length=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensorboard: bool = True


class Config(BaseModel):
    """A whole run."""

    model_config = CLOSED

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    plan: PlanSection = PlanSection()
    sample: SampleSection = SampleSection()
    run: RunSection = RunSection()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder)

    @property
    def cache(self) -> Path:
        """The folder of tokenised data: shared by runs that are side by side, unless given."""
        return Path(self.data.cache) if self.data.cache else self.folder.parent / "tokens"


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the TOML file `path`, with `section.key=value` overrides applied.

    Raises InputError for a file that is missing or is not TOML, and for every bad value in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad(
            f"the configuration {path}, which cannot be read ({_reason(error)})",
            "a TOML file",
            "shardwise train examples/quickstart.toml",
        ) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise bad(
            f"the configuration {path}, which is not TOML: {error}",
            'sections in brackets and lines key = value, text in "quotes"',
            "[train] and under it steps = 1000, for example",
        ) from None
    return build(override(values, overrides), str(path))


def build(values: Mapping[str, Any], where: str = "the configuration") -> Config:
    """The configuration with these sections. Raises InputError that answers all that is wrong."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise refusal(where, [_problem(dict(found)) for found in error.errors()]) from None


def override(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with each `section.key=value` set; a value that is no TOML value is text."""
    merged = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            raise bad(f"--set {text}", "section.key=value", "--set train.steps=100, for example")
        part = merged.setdefault(section, {})
        if isinstance(part, dict):
            part[name] = _value(value.strip())
    return merged


def dump(config: Config) -> str:
    """The configuration as TOML that reads back to the same value; unset keys are left out."""
    parts = []
    for section, values in config.model_dump().items():
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's, but for the character 127
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _problem(found: dict[str, Any]) -> Problem:
    """One of pydantic's findings as what was given, what is allowed, what to write instead."""
    path = [str(part) for part in found["loc"]]
    key, given = ".".join(path), found["input"]
    if found["type"] == "extra_forbidden":
        return _unknown(path)
    if found["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(f"{key} = {given!r}", f"a section [{key}] of keys", f"[{key}]")
    default = _default(path)
    instead = f"{key} = {_toml(default)}" if default is not None else f"leave {key} out"
    return Problem(f"{key} = {_shown(given)}", _allowed(found), instead)


def _allowed(found: dict[str, Any]) -> str:
    """The range or the type that pydantic wanted, without its 'Input should be'."""
    message = str(found["msg"])
    for opening in ("Input should be ", "Value should be ", "String should have "):
        message = message.removeprefix(opening)
    message = message.split(", unable to parse")[0].split(", got a number")[0]
    return message.replace("at least 1 character", "some text in it")


def _unknown(path: list[str]) -> Problem:
    parent = Config.model_fields if len(path) == 1 else _fields(path[0])
    names = list(parent)
    close = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)
    elsewhere = [f"{part}.{path[-1]}" for part in Config.model_fields if path[-1] in _fields(part)]
    where = f"in [{path[0]}]" if len(path) > 1 else "as sections"
    if elsewhere:
        instead = elsewhere[0]
    elif close:
        instead = ".".join([*path[:-1], close[0]])
    else:
        instead = f"leave {path[-1]} out"
    return Problem(f"the unknown key {'.'.join(path)}", f"{where}: {', '.join(names)}", instead)


def _fields(section: str) -> dict[str, Any]:
    field = Config.model_fields.get(section)
    return dict(type(field.default).model_fields) if field is not None else {}


def _default(path: list[str]) -> Any:
    field = _fields(path[0]).get(path[1]) if len(path) > 1 else None
    return field.default if field is not None else None


def _shown(given: Any) -> str:
    text = json.dumps(given, default=str)
    return text if len(text) < 80 else text[:77] + "..."


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
