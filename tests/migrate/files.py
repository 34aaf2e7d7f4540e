"""Files of DeepSpeed, accelerate and torchtitan, with the keys that their templates have."""

import json
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

#: The keys of accelerate's templates for DeepSpeed (examples/deepspeed_config_templates).
AUTO = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
DEEPSPEED: dict[str, Any] = {
    "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_num_steps": 20, "total_num_steps": 500},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
        **AUTO,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
#: The keys of examples/torch_native_parallelism/configs and of what `accelerate config` writes.
LAUNCHED: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
FSDP: dict[str, Any] = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
#: The keys of torchtitan's train_configs for llama3.
TITAN: dict[str, Any] = {
    "job": {"dump_folder": "./outputs", "description": "training", "print_args": False},
    "profiling": {"enable_profiling": True, "save_traces_folder": "trace", "profile_freq": 100},
    "metrics": {"log_freq": 10, "enable_tensorboard": True, "save_tb_folder": "tb"},
    "model": {"name": "llama3", "flavor": "8B", "hf_assets_path": "./assets"},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 200, "decay_type": "linear", "min_lr_factor": 0.0},
    "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000,
                 "dataset": "c4"},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
    },
    "checkpoint": {"interval": 500, "async_mode": "disabled", "export_dtype": "float32"},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "compile": {"enable": False, "components": ["model"]},
    "float8": {"enable_fsdp_float8_all_gather": False},
    "validation": {"enabled": False, "freq": 5},
}  # fmt: skip


def titan(**parallelism: Any) -> dict[str, Any]:
    return TITAN | {"parallelism": TITAN["parallelism"] | parallelism}


def toml(values: dict[str, Any]) -> str:
    return "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        for section, keys in values.items()
    )


def written(folder: Path, values: dict[str, Any], ending: str) -> Path:
    text = {"json": json.dumps, "yaml": yaml.safe_dump, "toml": toml}[ending](values)
    file = folder / f"config.{ending}"
    file.write_text(text)
    return file


def zero(stage: Any, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage} | keys}


def launched(**keys: Any) -> dict[str, Any]:
    return LAUNCHED | keys


def fsdp(**keys: Any) -> dict[str, Any]:
    return LAUNCHED | {"fsdp_config": {f"fsdp_{key}": value for key, value in keys.items()}}


def axes(**sizes: int) -> dict[str, Any]:
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return LAUNCHED | {"parallelism_config": named}
