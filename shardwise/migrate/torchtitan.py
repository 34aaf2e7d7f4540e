"""torchtitan's TOML, key by key (pytorch/torchtitan: the train_configs of versions up to 0.2)."""

from collections.abc import Mapping
from typing import Any, Final

from shardwise.migrate.deepspeed import offloaded_param
from shardwise.migrate.draft import (
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
    why,
    word,
)

PROJECT: Final = "torchtitan"
SCHEDULES: Final = {
    "GPIPE": "gpipe",
    "1F1B": "1f1b",
    "INTERLEAVED1F1B": "interleaved",
    "LOOPEDBFS": "bfs",
    "ZBVZEROBUBBLE": "zb-v",
    "DUALPIPEV": "dualpipe-v",
}
PRECISIONS: Final = {"BFLOAT16": "bf16", "FLOAT16": "fp16", "FLOAT32": "fp32"}


def _shard(draft: Draft, value: Any) -> str | Wrong:
    """-1 means all ranks that the other axes do not use."""
    if value != 1:
        draft.row = "zero3"
    if value == -1 and draft.axes.get("dp_replicate", 1) > 1:
        return "with dp_replicateN, write how many ranks share a copy: dp_shardM"
    return axis("dp_shard")(draft, value)


def _reshard(draft: Draft, value: Any) -> str | Wrong:
    """`default` is to reshard, except under a pipeline."""
    if value not in ("default", "always", "never"):
        return Wrong("default, always or never", '"default"')
    keeps = value == "never" or (value == "default" and draft.axes.get("pp", 1) > 1)
    if keeps and draft.row == "zero3":
        draft.row = "zero2"
    return ""


def _tensor(draft: Draft, value: Any) -> str | Wrong:
    draft.sequence = True  # torchtitan's tensor parallelism has sequence parallelism always
    return axis("tp")(draft, value)


def _selective(draft: Draft, value: Any) -> str | Wrong:
    if value != "op" and not str(value).isdecimal():
        return Wrong("op, or a number of layers in quotes", '"op"')
    if draft.recompute == "selective" and str(value).isdecimal():
        draft.recompute = f"every{value}"
    return ""


def _batch(draft: Draft, value: Any) -> str | Wrong:
    if value == -1:
        return "-1: set train.batch, the local batch times the data ranks"
    return key("train.batch", "a whole number")(draft, value)


def _enabled(section: str, name: str, last: str) -> Rule:
    """Whether something is done at all; if not, its interval here is 0."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if not isinstance(value, bool):
            return Wrong("true or false", "true")
        if value is False:
            draft.set(f"{section}.{name}", 0)
            return f"{section}.{name} = 0 {last}"
        return ""

    return _rule


def _async_mode(draft: Draft, value: Any) -> str | Wrong:
    modes = ("disabled", "async", "async_with_pinned_mem")
    if not isinstance(value, str) or value.lower() not in modes:
        return Wrong(", ".join(modes), '"async"')
    return draft.set("train.async_save", True) if value.lower() != "disabled" else ""


def _decay(draft: Draft, value: Any) -> str:
    if value not in ("linear", "cosine"):
        return "train.decay is cosine, linear or constant"
    return draft.set("train.decay", value)


def _beta(index: int) -> Any:
    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if not isinstance(value, float):
            return Wrong("a number", "0.9")
        betas = draft.values.setdefault("train", {}).setdefault("betas", [0.9, 0.95])
        betas[index] = value
        return ""

    return _rule


#: layers, width, heads, kv_heads, hidden of torchtitan's llama3.
_LLAMA3: Final = {
    "debugmodel": (6, 256, 16, 16, 768),
    "8B": (32, 4096, 32, 8, 14336),
    "70B": (80, 8192, 64, 8, 28672),
    "405B": (126, 16384, 128, 8, 53248),
}


def _model(draft: Draft, value: Any) -> str:
    draft.model = str(value)
    return "shardwise train has a GPT of any size: [model]; in a script, any model"


def _flavor(draft: Draft, value: Any) -> str:
    """The sizes of a Llama, which the GPT of `shardwise train` can have."""
    if draft.model not in ("llama3", "llama") or value not in _LLAMA3:
        return "its sizes are not known here: set [model] layers, width, heads, kv_heads, hidden"
    names = ("layers", "width", "heads", "kv_heads", "hidden")
    for name, size in zip(names, _LLAMA3[value], strict=True):
        draft.set(f"model.{name}", size)
    draft.set("model.tied", False)
    return "its sizes are in [model]; the vocabulary is that of data.tokens"


_ON: Final = only_if(bool, "8-bit computation is not in this version")
_DATA: Final = "data.source is a file, a folder or a glob"
_EPS: Final = "shardwise train has AdamW's 1e-8; in a script, sw.AdamW(eps=...)"

RULES: Final[Rules] = {
    "parallelism.data_parallel_replicate_degree": axis("dp_replicate"),
    "parallelism.pipeline_parallel_degree": axis("pp"),
    "parallelism.data_parallel_shard_degree": _shard,
    "parallelism.fsdp_reshard_after_forward": _reshard,
    "parallelism.tensor_parallel_degree": _tensor,
    "parallelism.expert_parallel_degree": axis("ep"),
    "parallelism.context_parallel_degree": axis("cp"),
    "parallelism.pipeline_parallel_schedule": word(
        "schedule",
        SCHEDULES,
        f"schedules: {', '.join(SCHEDULES.values())}",
        ("INTERLEAVEDZEROBUBBLE", "PIPELINESCHEDULESINGLE", "PIPELINESCHEDULEMULTI"),
    ),
    "parallelism.pipeline_parallel_split_points": why("plan.stages names modules"),
    "parallelism.module_fqns_per_model_part": why("plan.stages names modules"),
    "training.steps": key("train.steps", "a whole number"),
    "training.seq_len": key("model.sequence", "a whole number"),
    "training.max_norm": key("train.clip"),
    "training.seed": key("train.seed", "a whole number"),
    "training.global_batch_size": _batch,
    "training.local_batch_size": why("train.batch is this times accumulate times the data ranks"),
    "training.mixed_precision_param": word("precision", PRECISIONS),
    "training.dataset": why(_DATA),
    "training.enable_cpu_offload": offloaded_param,
    "optimizer.name": optimizer(
        {
            "adam": "AdamW is used, whose weight decay is not part of the gradient; in a script, "
            "optimizer=sw.Optim(torch.optim.Adam, ...)"
        }
    ),
    "optimizer.lr": of_optimizer(key("train.lr")),
    "optimizer.weight_decay": of_optimizer(key("train.weight_decay")),
    "optimizer.beta1": of_optimizer(_beta(0)),
    "optimizer.beta2": of_optimizer(_beta(1)),
    "optimizer.eps": why(_EPS),
    "lr_scheduler.warmup_steps": key("train.warmup", "a whole number"),
    "lr_scheduler.decay_type": _decay,
    "lr_scheduler.min_lr_factor": key("train.final"),
    "lr_scheduler.lr_min": key("train.final"),
    "activation_checkpoint.mode": word(
        "recompute",
        {"NONE": None, "SELECTIVE": "selective", "FULL": "full"},
        "full or selective; recompute:SIZE keeps within a budget",
        ("MEMORY_BUDGET",),
    ),
    "activation_checkpoint.selective_ac_option": _selective,
    **dict.fromkeys(
        ("checkpoint.enable", "checkpoint.enable_checkpoint"),
        _enabled("train", "save_every", "saves only at the end of the run"),
    ),
    "checkpoint.interval": key("train.save_every", "a whole number"),
    "checkpoint.keep_latest_k": key("train.keep", "a whole number"),
    "checkpoint.async_mode": _async_mode,
    "job.dump_folder": key("run.folder", "text"),
    "metrics.enable_tensorboard": tracker("tensorboard"),
    "metrics.enable_wandb": tracker("wandb"),
    **dict.fromkeys(
        ("validation.enable", "validation.enabled"),
        _enabled("train", "eval_every", "validates only at the end of the run"),
    ),
    "validation.freq": key("train.eval_every", "a whole number"),
    "model.name": _model,
    "model.flavor": _flavor,
    "float8.*": _ON,
    "mx.*": _ON,
    "quantize.*": _ON,
}


def defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What torchtitan does without the keys of `values`, dotted, where Shardwise does otherwise."""
    found: dict[str, Any] = {
        "parallelism.data_parallel_shard_degree": -1,
        "training.steps": 10000,
        "training.seq_len": 2048,
        "training.local_batch_size": 8,
        "optimizer.lr": 8e-4,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    }
    if "lr_scheduler.lr_min" not in values:
        found["lr_scheduler.min_lr_factor"] = 0.0
    for section in ("checkpoint", "validation"):
        if not any(name.startswith(f"{section}.") for name in values):
            found[f"{section}.enable"] = False
    # without FSDP, torchtitan ignores the precision beside tensor parallelism or a pipeline
    shards = values.get("parallelism.data_parallel_shard_degree", -1) != 1
    degrees = ("tensor_parallel_degree", "pipeline_parallel_degree")
    alone = all(values.get(f"parallelism.{name}", 1) == 1 for name in degrees)
    if shards or alone:
        found["training.mixed_precision_param"] = "bfloat16"
    return found


def left_to_program(_: Mapping[str, Any]) -> dict[str, str]:
    """Nothing: the file says all."""
    return {}
