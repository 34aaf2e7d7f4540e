"""DeepSpeed's JSON, key by key (docs/_pages/config-json.md of deepspeedai/DeepSpeed)."""

from collections.abc import Mapping
from typing import Any, Final

from shardwise.migrate.draft import (
    ALWAYS,
    AUTO,
    UNNEEDED,
    Draft,
    Rule,
    Rules,
    Wrong,
    axis,
    key,
    of_optimizer,
    only_if,
    optimizer,
    tracker,
    whole,
    why,
    word,
)

PROJECT: Final = "DeepSpeed"
STAGES: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
CONTEXT: Final = (
    "context parallelism is not in this version: every rank has whole sequences; tpN with sp, "
    "recompute:full or activations:host need less memory for long ones"
)
OFFLOAD: Final = (
    "offload:optim has the optimizer state in host memory, offload:param parameters too; "
    "offload:optim@disk and offload:param@disk have them on a disk (docs/offload.md)"
)


def _enabled(precision: str) -> Rule:
    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if not isinstance(value, bool) and value != "auto":
            return Wrong("true, false or auto", "true")
        if value == "auto":
            return AUTO
        return draft.set_field("precision", precision) if value else ""

    return _rule


def accumulated(draft: Draft, value: Any) -> str | Wrong:
    """A number of microbatches in a step, one after the other."""
    if value == "auto":
        return AUTO
    if not whole(value) or value < 1:
        return Wrong("a whole number from 1 up, or auto", "4")
    return draft.set_field("accumulate", value)


def _betas(draft: Draft, value: Any) -> str | Wrong:
    if value == "auto":
        return AUTO
    numbers = isinstance(value, list) and all(type(each) in (int, float) for each in value)
    if not numbers or len(value) != 2:
        return Wrong("two numbers in brackets", "[0.9, 0.95]")
    return draft.set("train.betas", value)


_DECAYS: Final = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    None: "constant",
}


def _scheduler(draft: Draft, value: Any) -> str:
    if value not in _DECAYS:
        return "shardwise train has the decays constant, linear and cosine after a linear warmup"
    if value is None:  # the optimizer's rate in all steps
        draft.set("train.warmup", 0)
    draft.set("train.decay", _DECAYS[value])
    return draft.set("train.final", 0.0) if value == "WarmupDecayLR" else ""


_DEVICES: Final = Wrong("cpu, nvme or none", '"cpu"')


def offloaded(draft: Draft, value: Any) -> str | Wrong:
    """The optimizer state in host memory, or on a disk."""
    value = str(value).lower()
    draft.offload, draft.disk = value in ("cpu", "true"), value == "nvme"
    known = draft.offload or value in ("nvme", "none", "false")
    return "" if known else _DEVICES


def _ratio(draft: Draft, value: Any) -> str | Wrong:
    """The fraction of the parameters whose state is in host memory."""
    if type(value) not in (int, float) or not 0 <= value <= 1:
        return Wrong("a number from 0 to 1", "0.5")
    draft.offload_share = float(value)
    return ""


def offloaded_param(draft: Draft, value: Any) -> str | Wrong:
    """Parameters in host memory or on a disk, and the optimizer state with them."""
    value = str(value).lower()
    draft.offload_param, draft.disk_param = value in ("cpu", "true"), value == "nvme"
    if draft.offload_param and draft.disk:
        return "parameters rest on the device, or with the state: offload:param@disk has both there"
    known = draft.offload_param or draft.disk_param or value in ("none", "false")
    return "" if known else _DEVICES


def _batch(_draft: Draft, value: Any) -> str:
    return AUTO if value == "auto" else "train.batch is this times accumulate times the data ranks"


RULES: Final[Rules] = {
    "zero_optimization.stage": word("row", STAGES),
    "fp16.enabled": _enabled("fp16"),
    "bf16.enabled": _enabled("bf16"),
    "bfloat16.enabled": _enabled("bf16"),
    "gradient_accumulation_steps": accumulated,
    "train_batch_size": key("train.batch", "a whole number"),
    "train_micro_batch_size_per_gpu": _batch,
    "gradient_clipping": key("train.clip"),
    "seed": key("train.seed", "a whole number"),
    "optimizer.type": optimizer(
        # DeepSpeed's Adam has adam_w_mode=true by default
        dict.fromkeys(("onebitadam", "zerooneadam"), "AdamW is used, without compressed gradients")
    ),
    "optimizer.params.lr": of_optimizer(key("train.lr")),
    "optimizer.params.weight_decay": of_optimizer(key("train.weight_decay")),
    "optimizer.params.betas": of_optimizer(_betas),
    "optimizer.params.eps": why("shardwise train has AdamW's 1e-8; in a script, sw.AdamW(eps=...)"),
    "optimizer.params.torch_adam": UNNEEDED,
    "optimizer.params.adam_w_mode": only_if(
        lambda value: value is False,
        "AdamW is used, whose weight decay is not part of the gradient; in a script, "
        "optimizer=sw.Optim(torch.optim.Adam, ...)",
    ),
    "optimizer.params.*": why("no option of shardwise train; in a script, sw.Optim(...)"),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_max_lr": of_optimizer(key("train.lr")),
    "scheduler.params.warmup_num_steps": key("train.warmup", "a whole number"),
    "scheduler.params.total_num_steps": key("train.steps", "a whole number"),
    "scheduler.params.cos_min_ratio": key("train.final"),
    "scheduler.params.*": why("the warmup of shardwise train is linear and begins near 0"),
    "tensor_parallel.autotp_size": axis("tp"),
    "tensor_parallel.*": why("styles of layers are a table: docs/tensor-tables.md"),
    "sequence_parallel_size": why(CONTEXT),
    "zero_optimization.offload_optimizer.device": offloaded,
    "zero_optimization.offload_param.device": offloaded_param,
    "zero_optimization.offload_optimizer.pin_memory": ALWAYS,
    "zero_optimization.offload_optimizer.ratio": _ratio,
    "zero_optimization.offload_optimizer.nvme_path": key("offload.folder", "text"),
    "zero_optimization.offload_param.nvme_path": key("offload.folder", "text"),
    "zero_optimization.offload_optimizer.*": why(OFFLOAD),
    "zero_optimization.offload_param.*": why(OFFLOAD),
    "zero_optimization.cpu_offload": offloaded,
    "zero_optimization.cpu_offload_params": offloaded_param,
    "zero_optimization.overlap_comm": ALWAYS,
    "zero_optimization.contiguous_gradients": ALWAYS,
    "zero_optimization.reduce_scatter": ALWAYS,
    "zero_optimization.round_robin_gradients": UNNEEDED,
    "zero_optimization.ignore_unused_parameters": ALWAYS,
    "zero_optimization.load_from_fp32_weights": UNNEEDED,
    "zero_optimization.elastic_checkpoint": ALWAYS,
    "zero_optimization.reduce_bucket_size": why(
        "it counts elements of whole gradients; Shardwise reduces units, merged to bucket:SIZE"
    ),
    "zero_optimization.allgather_bucket_size": why("gathers are of units: sw.FSDP(units=...)"),
    "zero_optimization.allgather_partitions": ALWAYS,
    "zero_optimization.sub_group_size": why("updates are of whole units"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": why(
        "sw.full_state_dict(engine) gathers weights"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": why(
        "sw.full_state_dict(engine) gathers weights"
    ),
    "zero_optimization.stage3_prefetch_bucket_size": why("one unit is gathered ahead"),
    "zero_optimization.stage3_param_persistence_threshold": why("small units are merged"),
    "zero_optimization.stage3_max_live_parameters": why("two units are gathered at a time"),
    "zero_optimization.stage3_max_reuse_distance": why("two units are gathered at a time"),
    "zero_optimization.mics_shard_size": why("write dp_replicateN dp_shardM zero3"),
    "zero_optimization.zero_hpz_partition_size": why("write dp_replicateN dp_shardM zero3"),
    "zero_optimization.zero_quantized_weights": why("messages are not quantized"),
    "zero_optimization.zero_quantized_gradients": why("messages are not quantized"),
    "zero_optimization.*": why("an option of DeepSpeed's engine without a counterpart"),
    "fp16.auto_cast": UNNEEDED,
    "fp16.*": why("the loss scale starts at 65536 and is adapted; in a script, see sw.parallelize"),
    "bf16.*": UNNEEDED,
    "amp.*": why("Apex is not supported: use bf16"),
    "gradient_predivide_factor": why("gradients are averaged over tokens, without overflow"),
    "prescale_gradients": why("gradients are averaged over tokens, without overflow"),
    "sparse_gradients": why("sparse gradients are reduced as dense ones"),
    "communication_data_type": why("gradients are reduced in the precision of the plan"),
    "data_types.*": why("gradients accumulate in fp32 over fp32 master weights"),
    "zero_allow_untested_optimizer": ALWAYS,
    "zero_force_ds_cpu_optimizer": why(OFFLOAD),
    "activation_checkpointing.*": why(
        "it takes effect in the model's calls: recompute:full does it"
    ),
    "pipeline.*": why("write ppN and a schedule such as 1f1b:8"),
    "expert_parallel.autoep_size": axis("ep"),
    "expert_parallel.*": why("experts are found in the model"),
    "aio.*": why(OFFLOAD),
    "steps_per_print": UNNEEDED,
    "wall_clock_breakdown": why("metrics.jsonl has the times of every step"),
    "memory_breakdown": why("shardwise predict PLAN shows it"),
    "dump_state": UNNEEDED,
    "flops_profiler.*": why("the report of a run has its model flops utilization"),
    "comms_logger.*": why("the ledger counts every byte; shardwise predict says it before"),
    "tensorboard.enabled": tracker("tensorboard"),
    "tensorboard.*": why("written into the run's folder"),
    "wandb.enabled": tracker("wandb"),
    "wandb.*": why("WANDB_PROJECT and other variables of wandb apply: run.trackers"),
    "csv_monitor.*": why("metrics are written to metrics.jsonl and TensorBoard"),
    "monitor_config.*": why("metrics are written to metrics.jsonl and TensorBoard"),
    "checkpoint.*": why("checkpoints load under any plan"),
    "elasticity.*": why("a checkpoint continues on another number of ranks: --resume"),
    "autotuning.*": why("shardwise predict and memory compare plans"),
    "compression_training.*": why("pruning and quantization are not a matter of plans"),
    "data_efficiency.*": why("sampling is not a matter of plans"),
    "curriculum_learning.*": why("sampling is not a matter of plans"),
    "sparse_attention.*": why("attention is the model's"),
    "hybrid_engine.*": why("generation is not a matter of plans"),
    "compile.*": why("docs/compile.md says where torch.compile works"),
    "progressive_layer_drop.*": why("every layer of the model is computed in every step"),
    "eigenvalue.*": why("a means of compression, which is not a matter of plans"),
    "data_sampling.*": why("sampling is not a matter of plans"),
    "managed_gradient_accumulation": ALWAYS,
    "disable_allgather": UNNEEDED,
    "dataloader_drop_last": why("the last batch may be uneven"),
    "use_node_local_storage": UNNEEDED,
    "use_data_before_expert_parallelism": UNNEEDED,
    "torch_autocast.*": why("the precision is a plan word: bf16 or fp16"),
    "zenflow.*": why(OFFLOAD),
}


def defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed does without the keys of `values`, dotted, where Shardwise does otherwise."""
    name, schedule = str(values.get("optimizer.type")).lower(), values.get("scheduler.type")
    found: dict[str, Any] = {"gradient_clipping": 0.0, "scheduler.type": None}
    if name in ("adam", "adamw", "onebitadam", "zerooneadam", "lion"):
        betas = [0.9, 0.999]
        found |= {"optimizer.params.betas": betas, "optimizer.params.weight_decay": 0.0}
    if schedule in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        steps, kind = "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type"
        found |= {steps: 1000, kind: "log"}
    if schedule in ("WarmupLR", "WarmupDecayLR"):
        found["scheduler.params.warmup_max_lr"] = 0.001
    if schedule == "WarmupCosineLR":
        found["scheduler.params.cos_min_ratio"] = 0.0001
    return found


def left_to_program(values: Mapping[str, Any]) -> dict[str, str]:
    """What a program passes to DeepSpeed where the file does not say it."""
    found = {
        "optimizer": "the program passes it: here AdamW with the defaults of [train]",
        "scheduler": "unless the program passes one, the rate is constant: so it is here",
    }
    return {name: text for name, text in found.items() if f"{name}.type" not in values}
