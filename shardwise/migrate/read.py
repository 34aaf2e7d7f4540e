"""Reads another system's file, and recognises the system."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwise.core.errors import InputError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.user_files import read_text
from shardwise.migrate import accelerate, deepspeed, torchtitan
from shardwise.migrate.draft import SAME, Draft, carry, flat
from shardwise.train.config import build

_ALLOWED: Final = "DeepSpeed's JSON, accelerate's YAML, torchtitan's TOML"
_EXAMPLE: Final = "shardwise plan --from ds_config.json"
_PROJECTS: Final = (deepspeed, accelerate, torchtitan)
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
    files = {project.PROJECT: values}
    if project is accelerate:
        files = _with_deepspeed(values, path)
    defaults = _defaults(files)
    draft = _drafted(files, defaults)
    _list_ratio(draft)
    _settle(draft)
    _require_ranks(draft)
    _list_without_effect(draft, files, defaults)
    return draft, project.PROJECT


#: The values of each file by its project: accelerate's YAML comes after a JSON that it names.
Files = dict[str, dict[str, Any]]


def _defaults(files: Files) -> Files:
    """What each system does without the keys that its file lacks, where Shardwise does otherwise.

    accelerate has none for DeepSpeed where DeepSpeed's own file is read.
    """
    found: Files = {}
    for project in _PROJECTS:
        if project.PROJECT in files:
            own = dict(flat(files[project.PROJECT]))
            missing = {k: v for k, v in project.defaults(own).items() if k not in own}
            found[project.PROJECT] = missing
    if deepspeed.PROJECT in files:
        found.get(accelerate.PROJECT, {}).pop("deepspeed_config.zero_stage", None)
    return found


def _drafted(files: Files, defaults: Files) -> Draft:
    draft = Draft()
    for project in _PROJECTS:
        name = project.PROJECT
        if name in files:
            carry(draft, project.RULES, files[name], name, defaults[name])
            for what, text in project.left_to_program(dict(flat(files[name]))).items():
                draft.assumed.append((what, None, text))
    return draft


def _list_without_effect(draft: Draft, files: Files, defaults: Files) -> None:
    """List keys without which the same would be carried over, and defaults with an effect."""
    listed = {name for name, _, _ in (*draft.left, *draft.assumed)}
    whole = _drafted(files, defaults).carried
    for project, own in files.items():
        for name, value in flat(own):
            changed = files | {project: _without(own, name)}
            if name not in listed and _carried(changed, defaults) == whole:
                draft.left.append((name, value, SAME))
    for project, own in defaults.items():
        for name, value in own.items():
            rest = defaults | {project: {k: v for k, v in own.items() if k != name}}
            if value is not None and name not in listed and _carried(files, rest) != whole:
                draft.assumed.append((name, value, "carried over"))


def _list_ratio(draft: Draft) -> None:
    """List a fraction of the optimizer's state that the plan does not have."""
    share = draft.offload_share
    if 0 < share < 1 and not any("optim=" in word for word in draft.words):
        name = "zero_optimization.offload_optimizer.ratio"
        text = "only the optimizer state in host memory has a fraction: offload:optim=0.5"
        draft.left.append((name, share, text))


def _carried(files: Files, defaults: Files) -> list[str]:
    """What is carried over from these keys; nothing if the file is wrong."""
    try:
        return _drafted(files, defaults).carried
    except InputError:
        return []


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The values without the dotted key `name`."""
    first, _, rest = name.partition(".")
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    return values | {first: _without(values[first], rest)}


def _with_deepspeed(values: dict[str, Any], path: Path) -> Files:
    """A YAML of accelerate with the JSON that it names, beside it or in the current folder.

    Raises InputError if it is in neither.
    """
    section = values.get("deepspeed_config")
    name = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if not isinstance(section, dict) or name in (None, "none"):
        return {accelerate.PROJECT: values}
    files = [path.parent / str(name), Path(str(name))]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        raise bad(
            f"deepspeed_config_file: {name} in {path}, a file that does not exist",
            f"the name of a DeepSpeed JSON beside {path.name} or in this folder",
            "its path, or --from with the JSON itself",
        )
    rest = {key: value for key, value in section.items() if key != "deepspeed_config_file"}
    own = values | {"deepspeed_config": rest}
    return {deepspeed.PROJECT: parsed(file), accelerate.PROJECT: own}


def _require_ranks(draft: Draft) -> None:
    """Raise InputError if the axes do not multiply to the number of processes."""
    plan, count = Plan.parse(draft.plan), draft.processes
    if count is None or count == plan.size or (plan.open and count % plan.size == 0):
        return
    raise bad(
        f"num_processes = {count} with the axes of the plan '{plan}'",
        "axes whose sizes multiply to the number of processes",
        f"num_processes: {plan.size}, or other sizes of the axes",
    )


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
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise bad(f"--from {path}, which cannot be read ({reason})", _ALLOWED, _EXAMPLE) from None
    try:
        values = _loaded(path, text)
    except InputError:
        raise
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
