"""Files of other systems become configurations: each key has an effect or a line that says why."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.core.tools.tree import dotted
from shardwise.migrate.read import NO_COUNTERPART, SYSTEMS, imported
from shardwise.train.config import build

yaml = pytest.importorskip("yaml")

#: As accelerate's templates for DeepSpeed (examples/deepspeed_config_templates).
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
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
}
#: As examples/torch_native_parallelism/configs and what `accelerate config` writes.
LAUNCHED: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "tpu_env": [],
    "use_cpu": False,
}
FSDP: dict[str, Any] = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_use_orig_params": True,
}
#: As torchtitan's train_configs for llama3.
TITAN: dict[str, Any] = {
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


Case = tuple[str, dict[str, Any], str]
ZERO3 = zero(3) | {"bf16": {"enabled": True}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/mnt/nvme"}
#: (ending, values, plan) of each file
CASES: dict[str, Case] = {
    "ZeRO-3 template": ("json", DEEPSPEED, "zero3 accumulate:4 fp16 offload:optim"),
    "ZeRO-3 in bf16": ("json", ZERO3, "zero3 bf16"),
    "parameters in host memory": ("json", zero(3, offload_param=CPU), "zero3 offload:param"),
    "ZeRO-Infinity's optimizer": (
        *("json", zero(3, offload_optimizer=NVME)),
        "zero3 offload:optim@disk",
    ),
    "ZeRO-Infinity's parameters": (
        *("json", zero(3, offload_optimizer=NVME, offload_param=NVME)),
        "zero3 offload:param@disk",
    ),
    "Ulysses": ("json", {"sequence_parallel_size": 2}, "cp2:ulysses"),
    "FSDP 1": ("yaml", launched(fsdp_config=FSDP), "zero3 recompute:full bf16"),
    "FSDP 2": ("yaml", fsdp(version=2, reshard_after_forward=False), "zero2 bf16"),
    "hybrid": (
        *("yaml", fsdp(sharding_strategy="HYBRID_SHARD") | {"num_machines": 2}),
        "dp_replicate2 dp_shard4 zero3 bf16",
    ),
    "DeepSpeed plugin": (
        *("yaml", launched(deepspeed_config={"zero_stage": 2, "gradient_accumulation_steps": 2})),
        "zero2 accumulate:2 bf16",
    ),
    "axes": (
        *("yaml", fsdp(reshard_after_forward=True) | axes(dp_replicate=2, dp_shard=2, tp=2, cp=1)),
        "dp_replicate2 dp_shard2 tp2 zero3 bf16",
    ),
    "processors": ("yaml", launched(use_cpu=True, mixed_precision="no"), "fp32"),
    "llama3 8B": ("toml", TITAN, "tp8 zero3 sp recompute:selective bf16"),
    "a pipeline": (
        "toml",
        titan(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B",
              tensor_parallel_degree=1, fsdp_reshard_after_forward="default"),
        "pp2 zero2 1f1b:4 recompute:selective bf16",
    ),
}  # fmt: skip


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    """Of the plan expected, which runs; without a key it differs, or the key has a line."""
    ending, values, expected = CASES[name]
    draft, project = imported(written(tmp_path, values, ending))
    assert draft.plan == Plan.parse(expected)
    assert problems(draft.plan) == []
    text = draft.toml("config", project)
    assert build(tomllib.loads(text)).plan.text == str(draft.plan)
    assert all(key in text and why for key, _, why in draft.left)
    known = SYSTEMS[f".{ending}"].keys
    assert {key for key, _, why in draft.left if why == NO_COUNTERPART} == {
        key for key, v in dotted(values) if v not in (None, []) and key not in known
    }


SHARDED = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}
#: (ending, values, plan, values of [train]) of files that leave most keys out
BARE: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        *("toml", {"model": {"name": "llama3"}}, "zero3 bf16 recompute:selective"),
        {"steps": 10000, "lr": 8e-4, "warmup": 200, "decay": "linear", "min_lr_ratio": 0.0},
    ),
    # without FSDP, torchtitan is in fp32 beside tensor parallelism
    (
        *("toml", {"parallelism": SHARDED}, "tp2 sp recompute:selective"),
        {"save_every": 0, "eval_every": 0},
    ),
    (
        *("json", DEEPSPEED, CASES["ZeRO-3 template"][2]),
        {"batch": 64, "clip": 0.5, "optimizer": "adamw", "lr": 3e-5, "betas": [0.9, 0.999]}
        | {"decay": "linear", "min_lr_ratio": 0.0, "warmup": 20, "steps": 500},
    ),
    ("json", zero(1), "zero1", {"clip": 0.0, "warmup": 0}),
    (
        *("json", {"scheduler": COSINE}, ""),
        {"steps": 5000, "warmup": 1000, "decay": "cosine", "min_lr_ratio": 0.0001},
    ),
    ("yaml", {"distributed_type": "FSDP"}, "zero3", {}),
    ("yaml", {"deepspeed_config": {"gradient_clipping": 1.0}}, "zero2", {"clip": 1.0}),
]


@pytest.mark.cases(len(BARE))
@pytest.mark.parametrize(("ending", "values", "plan", "train"), BARE)
def test_what_a_file_leaves_out_is_the_other_system_s_default(
    ending: str, values: dict[str, Any], plan: str, train: dict[str, Any], tmp_path: Path
) -> None:
    """Where Shardwise has another default; each has a line that says so."""
    draft, project = imported(written(tmp_path, values, ending))
    assert draft.plan == Plan.parse(plan)
    assert {**draft.values.get("train", {}), **train} == draft.values.get("train", {})
    text = draft.toml("config", project)
    assert build(tomllib.loads(text)).plan.text == str(draft.plan)
    assert draft.assumed
    assert all(f"#   {key} = " in text.partition("other defaults")[2] for key, _ in draft.assumed)


def test_another_optimizer_is_not_adamw_with_its_options(tmp_path: Path) -> None:
    """The first lines say it; the rates and decays of the other are not those of AdamW."""
    params = {"lr": 0.5, "weight_decay": 0.3, "betas": [0.1, 0.2]}
    values = {"optimizer": {"type": "Lamb", "params": params}, "train_batch_size": "x"}
    draft, project = imported(written(tmp_path, values, "json"))
    assert not {"lr", "weight_decay", "betas", "optimizer", "batch"} & set(draft.values["train"])
    assert "# It trains with AdamW instead of Lamb" in draft.toml("config", project)
    left = {key.removeprefix("train.") for key, _, _ in draft.left}
    assert left == {key for key, _ in dotted(values)} - {"train_batch_size"} | {"batch"}


NAMED = LAUNCHED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}


@pytest.mark.cases(20)
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", json.dumps(zero(7)), "stage = 7"),
        ("a.json", json.dumps({"zero_optimization": "3"}), "a section of keys"),
        ("a.json", json.dumps({"gradient_accumulation_steps": 0}), "from 1 up"),
        ("a.yaml", yaml.dump(fsdp(sharding_strategy="FULL")), 'fsdp_sharding_strategy = "FULL"'),
        ("a.yaml", yaml.dump(NAMED), "shardwise plan --from ds.json"),
        ("a.toml", toml({"parallelism": {"tensor_parallel_degree": "x"}}), 'degree = "x"'),
        ("missing.json", None, "cannot be read"),
        ("broken.json", "{", "cannot be read: "),
        ("broken.yaml", "a: [", "cannot be read: "),
        ("broken.toml", "= 1", "cannot be read: "),
        ("list.json", "[1]", "holds no keys"),
        ("other.json", '{"name": "x"}', "without a key of DeepSpeed"),
        ("config.ini", "", "a file of DeepSpeed's JSON"),
    ],
)
def test_what_cannot_become_a_configuration_is_refused(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: Any
) -> None:
    """Exit code 2, one paragraph, and nothing on stdout."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(tmp_path / name)])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert said in printed.err and printed.err.count("\n") == 1


def test_a_missing_reader_of_yaml_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to install, and not that the file is broken."""
    file = written(tmp_path, LAUNCHED, "yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InputError, match=r"Write instead: pip install pyyaml\.$"):
        imported(file)
