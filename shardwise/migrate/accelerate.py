"""accelerate's YAML, key by key: its own keys, and the sections for FSDP, DeepSpeed, Megatron.

(huggingface/accelerate: utils/dataclasses.py, commands/config/config_args.py, examples/.)
"""

from collections.abc import Mapping
from typing import Any, Final

from shardwise.migrate.deepspeed import (
    STAGES,
    accumulated,
    offloaded,
    offloaded_param,
)
from shardwise.migrate.draft import (
    Draft,
    Rule,
    Rules,
    Wrong,
    axis,
    key,
    only_if,
    ulysses,
    whole,
    word,
)

PROJECT: Final = "accelerate"
STRATEGIES: Final = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "zero3",
    "HYBRID_SHARD_ZERO2": "zero2",
}
KINDS: Final = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
PRECISIONS: Final = {"NO": "fp32", "FP16": "fp16", "BF16": "bf16", False: "fp32"}
RESHARD: Final = {True: "zero3", False: "zero2"}


def _strategy(draft: Draft, value: Any) -> str | Wrong:
    numbered = dict(enumerate(STRATEGIES, start=1))  # as torch's enum and older files
    name = numbered.get(value, "") if whole(value) else str(value).upper()
    if name not in STRATEGIES:
        return Wrong(", ".join(STRATEGIES), "FULL_SHARD")
    draft.row, draft.hybrid = STRATEGIES[name], "HYBRID" in name
    if not draft.hybrid:
        return ""
    if draft.processes and draft.processes % draft.hosts:
        counts = f"num_processes {draft.processes} on num_machines {draft.hosts}"
        return Wrong(f"as many processes on each machine, not {counts}", "num_processes: 8")
    one = draft.hosts < 2 or not draft.processes
    return "one copy on each host: with num_machines, dp_replicateN dp_shardM" if one else ""


def _reshard(draft: Draft, value: Any) -> str | Wrong:
    if isinstance(value, str):
        return _strategy(draft, value)  # files for version 1 of FSDP
    if not isinstance(value, bool):
        return Wrong("true or false", "true")
    return draft.set_field("row", RESHARD[value])


def _processes(draft: Draft, value: Any) -> str | Wrong:
    if not whole(value) or value < 1:
        return Wrong("a number of processes from 1 up", "8")
    draft.processes = value
    return ""


def _hosts(draft: Draft, value: Any) -> str | Wrong:
    if not whole(value) or value < 1:
        return Wrong("a number of machines from 1 up", "1")
    draft.hosts = value
    return "" if draft.hosts == 1 else "start one torchrun on each host"


def _microbatches(draft: Draft, value: Any) -> str | Wrong:
    if not whole(value) or value < 1:
        return Wrong("a number of microbatches from 1 up", "8")
    draft.microbatches = value
    return ""


def _shard(draft: Draft, value: Any) -> str | Wrong:
    if value != 1 and draft.row is None:  # shards are FSDP's
        draft.row = "zero3"
    return axis("dp_shard")(draft, value)


def _flag(name: str, set_to: Any = True) -> Rule:
    """A key that is true or false, and sets a field of the draft if it is true."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if not isinstance(value, bool):
            return Wrong("true or false", "true")
        if value and set_to is True:
            setattr(draft, name, True)
        elif value:
            return draft.set_field(name, set_to)
        return ""

    return _rule


def _on_cpu(draft: Draft, value: Any) -> str | Wrong:
    if not isinstance(value, bool):
        return Wrong("true or false", "true")
    return draft.set("run.device", "cpu") if value else ""


RULES: Final[Rules] = {
    "num_processes": _processes,
    "num_machines": _hosts,
    "distributed_type": only_if(
        lambda value: str(value).upper() not in (*KINDS, "FALSE"), "runs on GPUs and processors"
    ),
    "mixed_precision": word(
        "precision", PRECISIONS, "8-bit computation is not in this version", ("FP8",)
    ),
    "gradient_accumulation_steps": accumulated,
    "fsdp_config.fsdp_sharding_strategy": _strategy,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_activation_checkpointing": _flag("recompute", "full"),
    "fsdp_config.fsdp_offload_params": offloaded_param,
    "fsdp_config.fsdp_activation_checkpointing_offload": _flag("activations"),
    "deepspeed_config.zero_stage": word("row", STAGES),
    "deepspeed_config.gradient_accumulation_steps": accumulated,
    "deepspeed_config.gradient_clipping": key("train.clip"),
    "deepspeed_config.offload_optimizer_device": offloaded,
    "deepspeed_config.offload_param_device": offloaded_param,
    "deepspeed_config.offload_optimizer_nvme_path": key("offload.folder", "text"),
    "megatron_lm_config.megatron_lm_tp_degree": axis("tp"),
    "megatron_lm_config.megatron_lm_pp_degree": axis("pp"),
    "megatron_lm_config.megatron_lm_expert_model_parallel_size": axis("ep"),
    "megatron_lm_config.megatron_lm_num_micro_batches": _microbatches,
    "megatron_lm_config.megatron_lm_sequence_parallelism": _flag("sequence"),
    "megatron_lm_config.megatron_lm_recompute_activations": _flag("recompute", "selective"),
    "megatron_lm_config.megatron_lm_recompute_granularity": word(
        "recompute", {"FULL": "full", "SELECTIVE": "selective"}
    ),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": word(
        "row", {True: "zero1", False: "ddp"}
    ),
    "megatron_lm_config.megatron_lm_gradient_clipping": key("train.clip"),
    "megatron_lm_config.megatron_lm_context_parallel_size": axis("cp"),
    "megatron_lm_config.megatron_lm_optimizer_cpu_offload": offloaded,
    "parallelism_config.parallelism_config_dp_replicate_size": axis("dp_replicate"),
    "parallelism_config.parallelism_config_dp_shard_size": _shard,
    "parallelism_config.parallelism_config_tp_size": axis("tp"),
    "parallelism_config.parallelism_config_cp_size": axis("cp"),
    "parallelism_config.parallelism_config_sp_size": ulysses,
    "use_cpu": _on_cpu,
}


def defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What accelerate does without the keys of `values`, dotted, where Shardwise does otherwise."""
    found: dict[str, Any] = {}
    fsdp = str(values.get("distributed_type")).upper() == "FSDP"
    strategy, reshard = (
        f"fsdp_config.fsdp_{name}" for name in ("sharding_strategy", "reshard_after_forward")
    )
    if (fsdp or _has(values, "fsdp_config")) and strategy not in values and reshard not in values:
        second = values.get("fsdp_config.fsdp_version") == 2
        found |= {reshard: True} if second else {strategy: "FULL_SHARD"}
    file = values.get("deepspeed_config.deepspeed_config_file", "none")
    if _has(values, "deepspeed_config") and file == "none":
        found["deepspeed_config.zero_stage"] = 2
    return found


def _has(values: Mapping[str, Any], section: str) -> bool:
    return any(name.startswith(f"{section}.") for name in values)


def left_to_program(_: Mapping[str, Any]) -> dict[str, str]:
    """What a program that uses accelerate says itself."""
    what = "the program says it: here Shardwise's defaults of [train]"
    return {"optimizer, learning rate, clipping, batch": what}
