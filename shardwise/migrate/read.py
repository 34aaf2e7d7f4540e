"""Converts another system's file to a plan and a configuration, by the tables of `systems`."""

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardwise.core.errors import InputError, bad, read_text
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.migrate.systems import ACCELERATE, DEEPSPEED, TORCHTITAN, Meaning, System
from shardwise.train.config import build

_ALLOWED: Final = "DeepSpeed's JSON, accelerate's YAML, torchtitan's TOML"
_EXAMPLE: Final = "shardwise plan --from ds_config.json"
SYSTEMS: Final = {".json": DEEPSPEED, ".yaml": ACCELERATE, ".yml": ACCELERATE, ".toml": TORCHTITAN}

NO_COUNTERPART: Final = "no counterpart here"
AUTO: Final = "the program that reads the file decides; set the value that it takes"
#: Keys of our configuration that belong to the optimizer: another optimizer needs others.
_OF_OPTIMIZER: Final = ("train.lr", "train.betas", "train.weight_decay")


@dataclass
class Draft:
    """A plan and a configuration in the making.

    fields   the targets of the tables without a dot, which make the plan
    values   our configuration, by section
    left     keys that are not carried over: name, value, reason
    assumed  defaults of the other system that are carried over: name, value
    foreign  an optimizer that `shardwise train` does not have
    """

    fields: dict[str, Any] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    assumed: list[tuple[str, Any]] = field(default_factory=list)
    foreign: str | None = None

    def set(self, target: str, value: Any) -> str:
        """Set a target; the first of several values stays. Returns why it is not set, or ""."""
        section, _, name = target.rpartition(".")
        into = self.values.setdefault(section, {}) if section else self.fields
        kept = into.setdefault(name, value)
        return "" if kept == value else f"another key says {json.dumps(kept)}"

    @property
    def plan(self) -> Plan:
        """The plan; without a number of data ranks, they are the remaining ranks."""
        fields, axes = self.fields, self.axes()
        words = [f"{name}{size}" for name, size in axes.items()]
        words += [f"cp{fields['ulysses']}:ulysses"] if fields.get("ulysses", 1) > 1 else []
        words += [self._row, "sp" if "tp" in axes and "sp" in fields else ""]
        if "pp" in axes:
            name = fields.get("schedule", "1f1b")
            count = fields.get("accumulate") or 2 * axes["pp"]
            words.append(f"{name}:{count}{'x2' * (name in ('interleaved', 'bfs'))}")
        elif fields.get("accumulate", 1) > 1:
            words.append(f"accumulate:{fields['accumulate']}")
        words += [f"recompute:{fields['recompute']}"] if "recompute" in fields else []
        return Plan.parse(" ".join([*words, self._offload(), fields.get("precision", "")]))

    @property
    def _row(self) -> str:
        row = self.fields.get("row", "")
        if self.fields.get("dp_shard") == 1:
            return ""
        if row == "default":  # torchtitan's reshard_after_forward
            return "zero2" if self.fields.get("pp", 1) > 1 else "zero3"
        return row.removeprefix("hybrid ")

    def axes(self) -> dict[str, int]:
        """The sizes of the axes; one data axis alone is `dp`."""
        fields = self.fields
        names = ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep")
        axes = {name: fields[name] for name in names if fields.get(name, 1) > 1}
        hosts, processes = fields.get("hosts", 1), fields.get("processes", 0)
        if "hybrid" in fields.get("row", "") and hosts > 1 and processes % hosts == 0:
            axes = {"dp_replicate": hosts, "dp_shard": processes // hosts} | axes
        if fields.get("dp_shard") == -1:
            axes.pop("dp_replicate", None)
        data = [name for name in names[:2] if name in axes]
        return {"dp": axes.pop(data[0])} | axes if len(data) == 1 else axes

    def _offload(self) -> str:
        """The word `offload`; rows that keep all parameters and update a block have no `param`."""
        optim, param = (self.fields.get(name) for name in ("offload", "offload_param"))
        whole = param if self._row in ("zero3", "ddp", "") else None
        if "disk" in (optim, param):
            return "offload:param@disk" if whole == "disk" else "offload:optim@disk"
        return "offload:param" if whole else "offload:optim" if optim or param else ""

    def toml(self, file: str, project: str) -> str:
        """A configuration of `shardwise train`, with what could not be carried over as comments."""
        plan = self.plan
        lines = [f"# from {file}, a configuration of {project}"]
        lines += [f"# It trains with AdamW instead of {self.foreign}."] if self.foreign else []
        for section, values in ({"plan": {"text": str(plan)}} | self.values).items():
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        if "processes" in self.fields:
            lines += ["", f"# start it with --nproc {self.fields['processes']}"]
        rest = ", ".join(key for key, _, why in self.left if why == NO_COUNTERPART)
        comments = {
            "This version refuses the plan:": map(str, problems(plan)),
            f"Not in the file; {project} has other defaults than Shardwise:": (
                f"{key} = {_shown(value)}" for key, value in self.assumed
            ),
            "Not carried over:": [
                *(
                    f"{key} = {_shown(v)}: {why}"
                    for key, v, why in self.left
                    if why != NO_COUNTERPART
                ),
                *textwrap.wrap(rest, 92),
            ],
        }
        for head, said in comments.items():
            found = [f"#   {text}" for text in said]
            lines += ["", f"# {head}", *found] if found else []
        return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def imported(path: Path) -> tuple[Draft, str]:
    """The contents of the file, and the name of the system it is for."""
    system = SYSTEMS.get(path.suffix.lower())
    if system is None:
        raise bad(f"--from {path}", f"a file of {_ALLOWED}", _EXAMPLE)
    values = dict(flat(_parsed(path)))
    known = {name.partition(".")[0] for name in (*system.keys, "distributed_type", "model")}
    if not known & {name.partition(".")[0] for name in values}:
        given = f"--from {path}, without a key of {system.name}"
        raise bad(given, f"a configuration: {_ALLOWED}", _EXAMPLE)
    named = values.get("deepspeed_config.deepspeed_config_file", "none")
    if named != "none":
        given = f"--from {path}, which names another configuration, {named}"
        raise bad(given, "the file that is named", f"shardwise plan --from {named}")
    # torchtitan's tensor parallelism has sequence parallelism always
    draft = Draft({"sp": True} if system is TORCHTITAN else {})
    _carry(draft, system, values)
    _settle(draft)
    return draft, system.name


def _carry(draft: Draft, system: System, values: dict[str, Any]) -> None:
    """Carry over every key of the table, then the defaults of the system."""
    defaults = {k: v for k, v in system.defaults(values).items() if k not in values}
    known = [name for name in system.keys if name in values]
    for name in dict.fromkeys((*known, *values)):
        if reason := _carried(draft, system, name, values[name]):
            draft.left.append((name, values[name], reason))
    for name, value in defaults.items():
        if not _carried(draft, system, name, value):
            draft.assumed.append((name, value))


def _carried(draft: Draft, system: System, name: str, value: Any) -> str:
    key = system.keys.get(name)
    given = f"{name} = {_shown(value)} in a file of {system.name}"
    if key is None:
        if inner := next((each for each in system.keys if each.startswith(f"{name}.")), ""):
            raise bad(given, "a section of keys", inner)
        return NO_COUNTERPART
    if value == "auto":
        return AUTO
    if draft.foreign and key.target in _OF_OPTIMIZER:
        return f"an option of {draft.foreign}, which is not carried over"
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    allowed, value = _translated(key, value)
    if allowed and key.target == "train.optimizer":
        draft.foreign = str(value)
        return "shardwise train has adamw, lion, adafactor and muon"
    if allowed and "." in key.target:
        return f"allowed here: {allowed}"
    if allowed:
        raise bad(given, allowed, f"{name} = {allowed.partition(',')[0]}")
    return draft.set(key.target, value) if value is not None else ""


def _translated(key: Meaning, value: Any) -> tuple[str, Any]:
    """The value here, and ""; or what is allowed, and the value as it is."""
    if key.values is not None:
        said = value.lower() if isinstance(value, str) else value
        for known, meant in key.values.items():
            if known == said and isinstance(known, bool) == isinstance(said, bool):
                return "", meant
        return ", ".join(map(json.dumps, key.values)), value
    right = "." in key.target or (type(value) is int and (value >= 1 or value == -1))
    return "" if right else "1, a whole number from 1 up", value


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif value is not None and value != []:
            yield f"{before}{name}", value


def _settle(draft: Draft) -> None:
    """Leave out, with the reason, what the plan or `shardwise train` does not accept."""
    fields, train = draft.fields, draft.values.setdefault("train", {})
    copies = fields.get("dp_replicate", 1) > 1 and fields.get("dp_shard") == -1
    if copies or ("hybrid" in fields.get("row", "") and "dp_shard" not in draft.axes()):
        text = "write the copies and the ranks that share one: dp_replicateN dp_shardM"
        draft.left.append(("the number of copies", fields.get("dp_replicate"), text))
    for section, values in list(draft.values.items()):
        for name, value in list(values.items()):
            steps = {"steps": train.get("steps", 1000)} if name == "warmup" else {}
            try:
                build({section: {name: value} | steps})
            except ValueError as error:
                del values[name]
                reason = str(error).partition("Allowed: ")[2].partition(". Write")[0]
                draft.left.append((f"{section}.{name}", value, f"allowed here: {reason}"))
        if not values:
            del draft.values[section]


def _parsed(path: Path) -> dict[str, Any]:
    loads = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix.lower(), _yaml)
    try:
        values = loads(read_text(path))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise bad(f"--from {path}, which cannot be read: {reason}", _ALLOWED, _EXAMPLE) from None
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise bad(f"--from {path}, which holds no keys", _ALLOWED, _EXAMPLE)
    return dict(values)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        given = "--from a file of YAML, without the package PyYAML"
        raise bad(given, "YAML with PyYAML installed", "pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
