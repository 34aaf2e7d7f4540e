"""DeepSpeed's JSON, key by key (docs/_pages/config-json.md of deepspeedai/DeepSpeed)."""

from collections.abc import Mapping
from typing import Any, Final

from shardwise.migrate.draft import (
    AUTO,
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
    ulysses,
    whole,
    why,
    word,
)

PROJECT: Final = "DeepSpeed"
STAGES: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


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
    "optimizer.params.adam_w_mode": only_if(
        lambda value: value is False,
        "AdamW is used, whose weight decay is not part of the gradient; in a script, "
        "optimizer=sw.Optim(torch.optim.Adam, ...)",
    ),
    "scheduler.type": _scheduler,
    "scheduler.params.warmup_max_lr": of_optimizer(key("train.lr")),
    "scheduler.params.warmup_num_steps": key("train.warmup", "a whole number"),
    "scheduler.params.total_num_steps": key("train.steps", "a whole number"),
    "scheduler.params.cos_min_ratio": key("train.final"),
    "tensor_parallel.autotp_size": axis("tp"),
    "tensor_parallel.*": why("styles of layers are a table: docs/how-to/tables.md"),
    "sequence_parallel_size": ulysses,
    "zero_optimization.offload_optimizer.device": offloaded,
    "zero_optimization.offload_param.device": offloaded_param,
    "zero_optimization.offload_optimizer.ratio": _ratio,
    "zero_optimization.offload_optimizer.nvme_path": key("offload.folder", "text"),
    "zero_optimization.offload_param.nvme_path": key("offload.folder", "text"),
    "zero_optimization.cpu_offload": offloaded,
    "zero_optimization.cpu_offload_params": offloaded_param,
    "zero_optimization.mics_shard_size": why("write dp_replicateN dp_shardM zero3"),
    "zero_optimization.zero_hpz_partition_size": why("write dp_replicateN dp_shardM zero3"),
    "activation_checkpointing.*": why(
        "it takes effect in the model's calls: recompute:full does it"
    ),
    "pipeline.*": why("write ppN and a schedule such as 1f1b:8"),
    "expert_parallel.autoep_size": axis("ep"),
    "tensorboard.enabled": tracker("tensorboard"),
    "wandb.enabled": tracker("wandb"),
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
