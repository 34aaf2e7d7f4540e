import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.migrate.draft import NO_COUNTERPART, SAME, flat
from shardwise.migrate.read import imported
from shardwise.train.config import build

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
MEGATRON: dict[str, Any] = {
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_num_micro_batches": 4,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_sequence_parallelism": True,
    "megatron_lm_tp_degree": 2,
    "megatron_lm_use_distributed_optimizer": True,
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


ZERO3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ZeRO-3 template": ("json", DEEPSPEED, "zero3 accumulate:4 fp16 offload:optim"),
    "ZeRO-3 in bf16": ("json", ZERO3, "zero3 bf16"),
    "parameters in host memory": (
        "json",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero3 offload:param",
    ),
    "a part of the optimizer's state": (
        "json",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "ratio": 0.3},
            }
        },
        "zero3 offload:optim=0.3",
    ),
    "ZeRO-Infinity's optimizer": (
        "json",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"},
            }
        },
        "zero3 offload:optim@disk",
    ),
    "ZeRO-Infinity's parameters": (
        "json",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme"},
            }
        },
        "zero3 offload:param@disk",
    ),
    "FSDP 1 with CPUOffload": (
        "yaml",
        LAUNCHED | {"fsdp_config": FSDP | {"fsdp_offload_params": True}},
        "zero3 bf16 recompute:full offload:param",
    ),
    "ZeRO-1 and AutoTP": (
        "json",
        {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
        "tp2 zero1",
    ),
    "stage 0": ("json", {"zero_optimization": {"stage": 0}}, "ddp"),
    "FSDP 1": ("yaml", LAUNCHED | {"fsdp_config": FSDP}, "zero3 recompute:full bf16"),
    "FSDP 2": (
        "yaml",
        LAUNCHED | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
        "zero2 bf16",
    ),
    "hybrid": (
        "yaml",
        LAUNCHED | {"num_machines": 2, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
        "dp_replicate2 dp_shard4 zero3 bf16",
    ),
    "DeepSpeed plugin": (
        "yaml",
        LAUNCHED | {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 2}},
        "zero2 accumulate:2 bf16",
    ),
    "Megatron": (
        "yaml",
        LAUNCHED | {"megatron_lm_config": MEGATRON},
        "tp2 pp2 zero1 sp 1f1b:4 recompute:selective bf16",
    ),
    "axes": (
        "yaml",
        LAUNCHED
        | {
            "fsdp_config": {"fsdp_reshard_after_forward": True},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2,
                "parallelism_config_cp_size": 1,
            },
        },
        "dp_replicate2 dp_shard2 tp2 zero3 bf16",
    ),
    "llama3 8B": ("toml", TITAN, "tp8 zero3 sp recompute:selective bf16"),
    "a pipeline": (
        "toml",
        titan(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B",
              tensor_parallel_degree=1, fsdp_reshard_after_forward="default"),
        "pp2 zero2 1f1b:4 recompute:selective bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_a_plan(name: str, tmp_path: Path) -> None:
    """The plan is the one expected, this version runs it, and no key of the file is unknown."""
    ending, values, expected = CASES[name]
    draft, project = imported(written(tmp_path, values, ending))
    assert Plan.parse(draft.plan) == Plan.parse(expected)
    assert problems(Plan.parse(draft.plan)) == []
    assert [key for key, _, why in draft.left if f"knows of {project}" in why] == []


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_a_configuration(name: str, tmp_path: Path) -> None:
    """It is TOML that `shardwise train` accepts, with a comment for each key that is left."""
    ending, values, _ = CASES[name]
    draft, project = imported(written(tmp_path, values, ending))
    text = draft.toml("config", project)
    read = build(tomllib.loads(text))
    assert read.plan.text == draft.plan
    for key, _, why in draft.left:
        assert key in text if why == NO_COUNTERPART else f"#   {key} = " in text and why in text


def test_values_are_carried_over(tmp_path: Path) -> None:
    """Batch, rates, schedule and clipping are the file's; what is "auto" is named."""
    draft, _ = imported(written(tmp_path, DEEPSPEED, "json"))
    assert draft.values["train"] == {
        "batch": 64,
        "clip": 0.5,
        "optimizer": "adamw",
        "lr": 3e-5,
        "betas": [0.9, 0.999],  # DeepSpeed's default
        "decay": "linear",
        "final": 0.0,
        "warmup": 20,
        "steps": 500,
    }
    left = {key: why for key, _, why in draft.left}
    assert left["optimizer.params.weight_decay"].startswith("auto")
    assert "zero_optimization.offload_optimizer.device" not in left
    assert "offload:optim" in draft.words
    assert left["zero_optimization.offload_param.device"] == SAME  # none
    draft, _ = imported(written(tmp_path, TITAN, "toml"))
    assert draft.values["train"] | {"decay": "linear"} == draft.values["train"]
    sizes = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
    assert draft.values["model"] == {"sequence": 8192, "tied": False, **sizes}
    assert draft.values["train"]["save_every"] == 500


BARE: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "torchtitan": (
        "toml",
        {"model": {"name": "llama3", "flavor": "70B"}},
        "zero3 bf16 recompute:every2",
        {"steps": 10000, "lr": 8e-4, "warmup": 200, "decay": "linear", "final": 0.0},
    ),
    "torchtitan without FSDP, which is in fp32 beside tensor parallelism": (
        "toml",
        {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}},
        "tp2 sp recompute:every2",
        {"save_every": 0, "eval_every": 0},
    ),
    "DeepSpeed": ("json", {"zero_optimization": {"stage": 1}}, "zero1", {"clip": 0.0, "warmup": 0}),
    "DeepSpeed's Lion": (
        "json",
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}},
        "",
        {"optimizer": "lion", "lr": 1e-4, "weight_decay": 0.0},
    ),
    "Adafactor": (
        "json",
        {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
        "",
        {"optimizer": "adafactor", "lr": 0.01},
    ),
    "a cosine": (
        "json",
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}},
        "",
        {"steps": 5000, "warmup": 1000, "decay": "cosine", "final": 0.0001},
    ),
    "accelerate's FSDP 1": ("yaml", {"distributed_type": "FSDP"}, "zero3", {}),
    "accelerate's FSDP 2": ("yaml", {"fsdp_config": {"fsdp_version": 2}}, "zero3", {}),
    "accelerate's DeepSpeed": (
        "yaml",
        {"deepspeed_config": {"gradient_clipping": 1.0}},
        "zero2",
        {"clip": 1.0},
    ),
    "accelerate's shards": (
        "yaml",
        {"parallelism_config": {"parallelism_config_dp_shard_size": 2}},
        "dp2 zero3",
        {},
    ),
}


@pytest.mark.parametrize("name", BARE)
def test_what_a_file_leaves_out_is_the_other_system_s_default(name: str, tmp_path: Path) -> None:
    """Where Shardwise has another default; each has a line that says so."""
    ending, values, plan, train = BARE[name]
    draft, project = imported(written(tmp_path, values, ending))
    assert Plan.parse(draft.plan) == Plan.parse(plan)
    assert {**draft.values.get("train", {}), **train} == draft.values.get("train", {})
    text = draft.toml("config", project)
    assert build(tomllib.loads(text)).plan.text == draft.plan
    assert draft.assumed
    for key, _, why in draft.assumed:
        assert f"#   {key} = " in text.partition("has other defaults")[2] and why in text


@pytest.mark.parametrize("kind", ["Lamb", "OneBitLamb", "SGD", "MuAdamW"])
def test_another_optimizer_is_not_adamw_with_its_options(kind: str, tmp_path: Path) -> None:
    """The first lines say it; rates and decays of the other are not those of AdamW."""
    params = {"lr": 0.5, "weight_decay": 0.3, "betas": [0.1, 0.2], "momentum": 0.9}
    for values, ending in (
        ({"optimizer": {"type": kind, "params": params}}, "json"),
        ({"optimizer": {"name": kind, "lr": 0.5, "weight_decay": 0.3, "beta1": 0.1}}, "toml"),
    ):
        draft, project = imported(written(tmp_path, values, ending))
        assert not {"lr", "weight_decay", "betas", "optimizer"} & set(draft.values["train"])
        assert f"# It trains with AdamW instead of {kind}" in draft.toml("config", project)
        assert {key for key, _ in flat(values)} == {key for key, _, _ in draft.left}


def test_a_fraction_has_a_line_wherever_its_key_is(tmp_path: Path) -> None:
    """Also where parameters rest in host memory by an older key, which comes later."""
    offload = {"device": "cpu", "ratio": 0.3}
    stage3 = {"stage": 3, "offload_optimizer": offload, "cpu_offload_params": True}
    draft, _ = imported(written(tmp_path, {"zero_optimization": stage3}, "json"))
    assert "offload:param" in draft.words
    assert "zero_optimization.offload_optimizer.ratio" in [key for key, _, _ in draft.left]


def test_context_parallelism(tmp_path: Path) -> None:
    """Rings are `cp`; the all-to-all of DeepSpeed is `cp` with Ulysses."""
    draft, _ = imported(written(tmp_path, titan(context_parallel_degree=4), "toml"))
    assert "cp4" in draft.words
    draft, _ = imported(written(tmp_path, {"sequence_parallel_size": 2}, "json"))
    assert "cp2:ulysses" in draft.words


def test_the_folder_of_states_on_a_disk(tmp_path: Path) -> None:
    """The path of the optimizer is the folder; parameters in host memory are left over."""
    offload = {"device": "nvme", "nvme_path": "/mnt/nvme"}
    stage3 = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu"}}
    draft, _ = imported(written(tmp_path, {"zero_optimization": stage3}, "json"))
    assert draft.values["offload"] == {"folder": "/mnt/nvme"}
    assert [key for key, _, _ in draft.left] == ["zero_optimization.offload_param.device"]


def test_a_fraction_of_the_states_on_a_disk_is_left_over(tmp_path: Path) -> None:
    """DeepSpeed's ratio is of the updates on the host, which those on a disk all are."""
    offload = {"device": "nvme", "nvme_path": "/mnt/nvme", "ratio": 0.5}
    stage3 = {"stage": 3, "offload_optimizer": offload}
    draft, _ = imported(written(tmp_path, {"zero_optimization": stage3}, "json"))
    assert "offload:optim@disk" in draft.words
    assert [key for key, _, _ in draft.left] == ["zero_optimization.offload_optimizer.ratio"]


def test_a_yaml_that_names_a_json_is_read_with_it(tmp_path: Path) -> None:
    """The JSON beside it is carried over; without it, the YAML is refused."""
    named = LAUNCHED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    file = written(tmp_path, named, "yaml")
    with pytest.raises(InputError, match=r"deepspeed_config_file: ds\.json .* does not exist"):
        imported(file)
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    assert Plan.parse(imported(file)[0].plan) == Plan.parse("zero3 bf16")


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    """It is left over, and listed."""
    draft, _ = imported(written(tmp_path, ZERO3 | {"zero_optimisation": {"stage": 2}}, "json"))
    assert draft.left[-1][0] == "zero_optimisation.stage"
    assert draft.left[-1][2] == NO_COUNTERPART


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.json", None, "cannot be read"),
        ("broken.json", "{", "which is broken"),
        ("broken.yaml", "a: [", "which is broken"),
        ("broken.toml", "= 1", "which is broken"),
        ("list.json", "[1]", "holds no keys"),
        ("other.json", '{"name": "x"}', "without a key of DeepSpeed"),
        ("config.ini", "", "a file of DeepSpeed's JSON"),
    ],
)
def test_what_is_no_configuration_is_refused(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: Any
) -> None:
    """Exit code 2 and one paragraph."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(tmp_path / name)])
    printed = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said in printed and "\n" not in printed


def test_the_command_prints_the_configuration(tmp_path: Path, capsys: Any) -> None:
    """What it prints is the file for `shardwise train`."""
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(written(tmp_path, ZERO3, "json"))])
    assert not end.value.code
    assert tomllib.loads(capsys.readouterr().out)["plan"]["text"] == str(Plan.parse("zero3 bf16"))
