"""Converts a file of another system to a plan and a configuration.

A table has a row for each key that carries meaning. Its target is a field of the plan (`row`, `tp`,
`precision`) or a key of our configuration (`train.lr`). With `values` only these values are known,
with their meanings; text is compared in small letters, and None says nothing.

DeepSpeed   docs/_pages/config-json.md of deepspeedai/DeepSpeed
accelerate  utils/dataclasses.py and commands/config/config_args.py of huggingface/accelerate
torchtitan  the train_configs of pytorch/torchtitan, of versions up to 0.2
"""

import json
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardwise.core.errors import InputError, bad, read_text
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.core.tools.tree import dotted
from shardwise.train.config import build

Meaning = tuple[str, Mapping[Any, Any] | None]  # of a key of another system: target, values
Values = Mapping[str, Any]  # of a file, by dotted names


class System(NamedTuple):
    """Another system: its keys, and its defaults for a file where ours are others."""

    name: str
    keys: Mapping[str, Meaning]
    defaults: Callable[[Values], dict[str, Any]]


STAGES: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
PLACES: Final = {"cpu": "host", "nvme": "disk", "none": None, True: "host", False: None}
OPTIMIZERS: Final = {
    **dict.fromkeys(("adam", "adamw", "onebitadam", "zerooneadam"), "adamw"),
    **{name: name for name in ("lion", "adafactor", "muon")},
}


def _on(value: Any) -> dict[Any, Any]:
    return {True: value, False: None}


_SCHEDULES: Final = {
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
    "constant": "constant",
}


def _deepspeed_defaults(values: Values) -> dict[str, Any]:
    schedule = str(values.get("scheduler.type", "constant")).lower()
    found: dict[str, Any] = {"gradient_clipping": 0.0, "scheduler.type": "constant"}
    if OPTIMIZERS.get(str(values.get("optimizer.type")).lower()) in ("adamw", "lion"):
        found |= {"optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0.0}
    found["scheduler.params.warmup_num_steps"] = 0 if schedule == "constant" else 1000
    if schedule in ("warmuplr", "warmupdecaylr"):
        found["scheduler.params.warmup_max_lr"] = 0.001
    least = {"warmupdecaylr": 0.0, "warmupcosinelr": 0.0001}
    if schedule in least:
        found["scheduler.params.cos_min_ratio"] = least[schedule]
    return found


DEEPSPEED: Final = System(
    "DeepSpeed",
    {
        "zero_optimization.stage": ("row", STAGES),
        "zero_optimization.offload_optimizer.device": ("offload", PLACES),
        "zero_optimization.offload_optimizer.nvme_path": ("offload.folder", None),
        "zero_optimization.offload_param.device": ("offload_param", PLACES),
        "zero_optimization.offload_param.nvme_path": ("offload.folder", None),
        "fp16.enabled": ("precision", _on("fp16")),
        "bf16.enabled": ("precision", _on("bf16")),
        "gradient_accumulation_steps": ("accumulate", None),
        "train_batch_size": ("train.batch", None),
        "gradient_clipping": ("train.clip", None),
        "optimizer.type": ("train.optimizer", OPTIMIZERS),
        "optimizer.params.lr": ("train.lr", None),
        "optimizer.params.weight_decay": ("train.weight_decay", None),
        "optimizer.params.betas": ("train.betas", None),
        "scheduler.type": ("train.decay", _SCHEDULES),
        "scheduler.params.warmup_max_lr": ("train.lr", None),
        "scheduler.params.warmup_num_steps": ("train.warmup", None),
        "scheduler.params.total_num_steps": ("train.steps", None),
        "scheduler.params.cos_min_ratio": ("train.min_lr_ratio", None),
        "tensor_parallel.autotp_size": ("tp", None),
        "sequence_parallel_size": ("ulysses", None),
    },
    _deepspeed_defaults,
)

_STRATEGIES: Final = {
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "no_shard": "ddp",
    "hybrid_shard": "hybrid zero3",
    "hybrid_shard_zero2": "hybrid zero2",
}
_RESHARD: Final = {True: "zero3", False: "zero2", **_STRATEGIES}
_MIXED: Final = {"no": "fp32", False: "fp32", "fp16": "fp16", "bf16": "bf16"}


def _accelerate_defaults(values: Values) -> dict[str, Any]:
    def has(section: str) -> bool:
        return any(name.startswith(f"{section}.") for name in values)

    found: dict[str, Any] = {}
    fsdp = str(values.get("distributed_type")).upper() == "FSDP" or has("fsdp_config")
    if fsdp or values.get("parallelism_config.parallelism_config_dp_shard_size", 1) != 1:
        found["fsdp_config.fsdp_sharding_strategy"] = "FULL_SHARD"
    if has("deepspeed_config"):
        found["deepspeed_config.zero_stage"] = 2
    return found


ACCELERATE: Final = System(
    "accelerate",
    {
        "num_processes": ("processes", None),
        "num_machines": ("hosts", None),
        "mixed_precision": ("precision", _MIXED),
        "gradient_accumulation_steps": ("accumulate", None),
        "use_cpu": ("run.device", _on("cpu")),
        "fsdp_config.fsdp_sharding_strategy": ("row", _STRATEGIES),
        "fsdp_config.fsdp_reshard_after_forward": ("row", _RESHARD),
        "fsdp_config.fsdp_activation_checkpointing": ("recompute", _on("full")),
        "fsdp_config.fsdp_offload_params": ("offload_param", PLACES),
        "deepspeed_config.zero_stage": ("row", STAGES),
        "deepspeed_config.gradient_accumulation_steps": ("accumulate", None),
        "deepspeed_config.gradient_clipping": ("train.clip", None),
        "deepspeed_config.offload_optimizer_device": ("offload", PLACES),
        "deepspeed_config.offload_optimizer_nvme_path": ("offload.folder", None),
        "deepspeed_config.offload_param_device": ("offload_param", PLACES),
        "parallelism_config.parallelism_config_dp_replicate_size": ("dp_replicate", None),
        "parallelism_config.parallelism_config_dp_shard_size": ("dp_shard", None),
        "parallelism_config.parallelism_config_tp_size": ("tp", None),
        "parallelism_config.parallelism_config_cp_size": ("cp", None),
        "parallelism_config.parallelism_config_sp_size": ("ulysses", None),
    },
    _accelerate_defaults,
)

_SCHEDULE_NAMES: Final = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "bfs",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
_GATHERED: Final = {"always": "zero3", "never": "zero2", "default": "default"}
_TYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_RECOMPUTE: Final = {"none": None, "selective": "selective", "full": "full"}
_NEVER: Final = {True: None, False: 0}


def _torchtitan_defaults(values: Values) -> dict[str, Any]:
    def degree(name: str, default: int = 1) -> Any:
        return values.get(f"parallelism.{name}_degree", default)

    found: dict[str, Any] = {
        "parallelism.data_parallel_shard_degree": -1,
        "parallelism.fsdp_reshard_after_forward": "default",
        "training.steps": 10000,
        "training.seq_len": 2048,
        "optimizer.lr": 8e-4,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "activation_checkpoint.mode": "selective",
    }
    for section in ("checkpoint", "validation"):
        if not any(name.startswith(f"{section}.") for name in values):
            found[f"{section}.enable"] = False
    # without FSDP, torchtitan ignores the precision beside tensor parallelism or a pipeline
    alone = degree("tensor_parallel") == degree("pipeline_parallel") == 1
    if alone or degree("data_parallel_shard", -1) != 1:
        found["training.mixed_precision_param"] = "bfloat16"
    return found


TORCHTITAN: Final = System(
    "torchtitan",
    {
        "parallelism.data_parallel_replicate_degree": ("dp_replicate", None),
        "parallelism.data_parallel_shard_degree": ("dp_shard", None),
        "parallelism.fsdp_reshard_after_forward": ("row", _GATHERED),
        "parallelism.tensor_parallel_degree": ("tp", None),
        "parallelism.context_parallel_degree": ("cp", None),
        "parallelism.expert_parallel_degree": ("ep", None),
        "parallelism.pipeline_parallel_degree": ("pp", None),
        "parallelism.pipeline_parallel_schedule": ("schedule", _SCHEDULE_NAMES),
        "training.steps": ("train.steps", None),
        "training.seq_len": ("model.sequence", None),
        "training.max_norm": ("train.clip", None),
        "training.global_batch_size": ("train.batch", None),
        "training.mixed_precision_param": ("precision", _TYPES),
        "training.enable_cpu_offload": ("offload_param", PLACES),
        "optimizer.name": ("train.optimizer", OPTIMIZERS),
        "optimizer.lr": ("train.lr", None),
        "optimizer.weight_decay": ("train.weight_decay", None),
        "lr_scheduler.warmup_steps": ("train.warmup", None),
        "lr_scheduler.decay_type": ("train.decay", {"linear": "linear", "cosine": "cosine"}),
        "lr_scheduler.min_lr_factor": ("train.min_lr_ratio", None),
        "activation_checkpoint.mode": ("recompute", _RECOMPUTE),
        "checkpoint.enable": ("train.save_every", _NEVER),
        "checkpoint.interval": ("train.save_every", None),
        "validation.enable": ("train.eval_every", _NEVER),
        "validation.freq": ("train.eval_every", None),
    },
    _torchtitan_defaults,
)

# --- a file as a plan and a configuration ---------------------------------------------------------

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
    values = {name: v for name, v in dotted(_parsed(path)) if v is not None and v != []}
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
    defaults = {k: v for k, v in system.defaults(values).items() if k not in values}
    known = [name for name in system.keys if name in values]
    for name in dict.fromkeys((*known, *values)):
        if reason := _carried(draft, system, name, values[name]):
            draft.left.append((name, values[name], reason))
    for name, value in defaults.items():
        if not _carried(draft, system, name, value):
            draft.assumed.append((name, value))
    _settle(draft)
    return draft, system.name


def _carried(draft: Draft, system: System, name: str, value: Any) -> str:
    key = system.keys.get(name)
    given = f"{name} = {_shown(value)} in a file of {system.name}"
    if key is None:
        if inner := next((each for each in system.keys if each.startswith(f"{name}.")), ""):
            raise bad(given, "a section of keys", inner)
        return NO_COUNTERPART
    if value == "auto":
        return AUTO
    target, meanings = key
    if draft.foreign and target in _OF_OPTIMIZER:
        return f"an option of {draft.foreign}, which is not carried over"
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    allowed, value = _translated(target, meanings, value)
    if allowed and target == "train.optimizer":
        draft.foreign = str(value)
        return "shardwise train has adamw, lion, adafactor and muon"
    if allowed and "." in target:
        return f"allowed here: {allowed}"
    if allowed:
        raise bad(given, allowed, f"{name} = {allowed.partition(',')[0]}")
    return draft.set(target, value) if value is not None else ""


def _translated(target: str, meanings: Values | None, value: Any) -> tuple[str, Any]:
    """The value here, and ""; or what is allowed, and the value as it is."""
    if meanings is not None:
        said = value.lower() if isinstance(value, str) else value
        for known, meant in meanings.items():
            if known == said and isinstance(known, bool) == isinstance(said, bool):
                return "", meant
        return ", ".join(map(json.dumps, meanings)), value
    right = "." in target or (type(value) is int and (value >= 1 or value == -1))
    return "" if right else "1, a whole number from 1 up", value


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
    loads: Callable[[str], Any] | None
    loads = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix.lower())
    try:
        if loads is None:
            import yaml

            loads = yaml.safe_load
        values = loads(read_text(path))
    except InputError:
        raise
    except ImportError:
        given = "--from a file of YAML, without the package PyYAML"
        raise bad(given, "YAML with PyYAML installed", "pip install pyyaml") from None
    except Exception as error:  # noqa: BLE001 - each library raises its own
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise bad(f"--from {path}, which cannot be read: {reason}", _ALLOWED, _EXAMPLE) from None
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise bad(f"--from {path}, which holds no keys", _ALLOWED, _EXAMPLE)
    return dict(values)
