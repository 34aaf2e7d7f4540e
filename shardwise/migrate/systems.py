"""The keys of DeepSpeed, accelerate and torchtitan that carry meaning.

A table has a row for each key. Its target is a field of the plan (`row`, `tp`, `precision`) or a
key of our configuration (`train.lr`). With `values` only these values are known, with their
meanings; text is compared in small letters, and None says nothing.

DeepSpeed   docs/_pages/config-json.md of deepspeedai/DeepSpeed
accelerate  utils/dataclasses.py and commands/config/config_args.py of huggingface/accelerate
torchtitan  the train_configs of pytorch/torchtitan, of versions up to 0.2
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple


class Meaning(NamedTuple):
    """The meaning of a key of another system."""

    target: str
    values: Mapping[Any, Any] | None = None


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


# --- DeepSpeed ---------------------------------------------------------------------------------

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
        "zero_optimization.stage": Meaning("row", STAGES),
        "zero_optimization.offload_optimizer.device": Meaning("offload", PLACES),
        "zero_optimization.offload_optimizer.nvme_path": Meaning("offload.folder"),
        "zero_optimization.offload_param.device": Meaning("offload_param", PLACES),
        "zero_optimization.offload_param.nvme_path": Meaning("offload.folder"),
        "fp16.enabled": Meaning("precision", _on("fp16")),
        "bf16.enabled": Meaning("precision", _on("bf16")),
        "gradient_accumulation_steps": Meaning("accumulate"),
        "train_batch_size": Meaning("train.batch"),
        "gradient_clipping": Meaning("train.clip"),
        "optimizer.type": Meaning("train.optimizer", OPTIMIZERS),
        "optimizer.params.lr": Meaning("train.lr"),
        "optimizer.params.weight_decay": Meaning("train.weight_decay"),
        "optimizer.params.betas": Meaning("train.betas"),
        "scheduler.type": Meaning("train.decay", _SCHEDULES),
        "scheduler.params.warmup_max_lr": Meaning("train.lr"),
        "scheduler.params.warmup_num_steps": Meaning("train.warmup"),
        "scheduler.params.total_num_steps": Meaning("train.steps"),
        "scheduler.params.cos_min_ratio": Meaning("train.min_lr_ratio"),
        "tensor_parallel.autotp_size": Meaning("tp"),
        "sequence_parallel_size": Meaning("ulysses"),
    },
    _deepspeed_defaults,
)

# --- accelerate --------------------------------------------------------------------------------

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
        "num_processes": Meaning("processes"),
        "num_machines": Meaning("hosts"),
        "mixed_precision": Meaning("precision", _MIXED),
        "gradient_accumulation_steps": Meaning("accumulate"),
        "use_cpu": Meaning("run.device", _on("cpu")),
        "fsdp_config.fsdp_sharding_strategy": Meaning("row", _STRATEGIES),
        "fsdp_config.fsdp_reshard_after_forward": Meaning("row", _RESHARD),
        "fsdp_config.fsdp_activation_checkpointing": Meaning("recompute", _on("full")),
        "fsdp_config.fsdp_offload_params": Meaning("offload_param", PLACES),
        "deepspeed_config.zero_stage": Meaning("row", STAGES),
        "deepspeed_config.gradient_accumulation_steps": Meaning("accumulate"),
        "deepspeed_config.gradient_clipping": Meaning("train.clip"),
        "deepspeed_config.offload_optimizer_device": Meaning("offload", PLACES),
        "deepspeed_config.offload_optimizer_nvme_path": Meaning("offload.folder"),
        "deepspeed_config.offload_param_device": Meaning("offload_param", PLACES),
        "parallelism_config.parallelism_config_dp_replicate_size": Meaning("dp_replicate"),
        "parallelism_config.parallelism_config_dp_shard_size": Meaning("dp_shard"),
        "parallelism_config.parallelism_config_tp_size": Meaning("tp"),
        "parallelism_config.parallelism_config_cp_size": Meaning("cp"),
        "parallelism_config.parallelism_config_sp_size": Meaning("ulysses"),
    },
    _accelerate_defaults,
)

# --- torchtitan --------------------------------------------------------------------------------

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
        "parallelism.data_parallel_replicate_degree": Meaning("dp_replicate"),
        "parallelism.data_parallel_shard_degree": Meaning("dp_shard"),
        "parallelism.fsdp_reshard_after_forward": Meaning("row", _GATHERED),
        "parallelism.tensor_parallel_degree": Meaning("tp"),
        "parallelism.context_parallel_degree": Meaning("cp"),
        "parallelism.expert_parallel_degree": Meaning("ep"),
        "parallelism.pipeline_parallel_degree": Meaning("pp"),
        "parallelism.pipeline_parallel_schedule": Meaning("schedule", _SCHEDULE_NAMES),
        "training.steps": Meaning("train.steps"),
        "training.seq_len": Meaning("model.sequence"),
        "training.max_norm": Meaning("train.clip"),
        "training.global_batch_size": Meaning("train.batch"),
        "training.mixed_precision_param": Meaning("precision", _TYPES),
        "training.enable_cpu_offload": Meaning("offload_param", PLACES),
        "optimizer.name": Meaning("train.optimizer", OPTIMIZERS),
        "optimizer.lr": Meaning("train.lr"),
        "optimizer.weight_decay": Meaning("train.weight_decay"),
        "lr_scheduler.warmup_steps": Meaning("train.warmup"),
        "lr_scheduler.decay_type": Meaning("train.decay", {"linear": "linear", "cosine": "cosine"}),
        "lr_scheduler.min_lr_factor": Meaning("train.min_lr_ratio"),
        "activation_checkpoint.mode": Meaning("recompute", _RECOMPUTE),
        "checkpoint.enable": Meaning("train.save_every", _NEVER),
        "checkpoint.interval": Meaning("train.save_every"),
        "validation.enable": Meaning("train.eval_every", _NEVER),
        "validation.freq": Meaning("train.eval_every"),
    },
    _torchtitan_defaults,
)
