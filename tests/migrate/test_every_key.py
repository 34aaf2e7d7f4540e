"""Every key of another system's file has an effect or a line; wrong values are refused."""

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.migrate.draft import flat
from shardwise.migrate.read import imported
from tests.migrate.test_migrate import CASES, DEEPSPEED, LAUNCHED, TITAN, written

#: More keys of DeepSpeed's documentation (docs/_pages/config-json.md), with values of its text.
DOCUMENTED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 100, "total_num_steps": 1e4},
    },
    "bf16": {"enabled": False},
    "amp": {"enabled": False, "opt_level": "O1"},
    "gradient_clipping": 0.0,
    "prescale_gradients": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": False,
        "round_robin_gradients": False,
        "offload_optimizer": {"device": "none", "pin_memory": False},
    },
    "zero_allow_untested_optimizer": False,
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "tensorboard": {"enabled": False, "output_path": "output/"},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (ending, values) for name, (ending, values, _) in CASES.items()},
    "DeepSpeed's documentation": ("json", DOCUMENTED),
    "nothing saved or validated": (
        "toml",
        TITAN
        | {
            "checkpoint": {"enable": False, "interval": 500},
            "validation": {"enable": False, "freq": 5},
        },
    ),
    "processors": ("yaml", LAUNCHED | {"use_cpu": True, "mixed_precision": "no"}),
}
TEMPLATES = find_spec("deepspeed")


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    rest = copy.deepcopy(values)
    part, (*outer, last) = rest, name.split(".")
    for key in outer:
        part = part[key]
    del part[last]
    return rest


def output(folder: Path, values: dict[str, Any], ending: str) -> str:
    try:
        draft, project = imported(written(folder, values, ending))
    except InputError as error:  # axes that multiply to the processes only with the key
        return str(error)
    return draft.toml("config", project)


def require_every_key(folder: Path, values: dict[str, Any], ending: str) -> None:
    """A key without a line must change what is printed."""
    draft, project = imported(written(folder, values, ending))
    text, listed = draft.toml("config", project), {key: why for key, _, why in draft.left}
    assert all(listed.values())
    for name, _ in flat(values):
        if name not in listed:
            assert output(folder, without(values, name), ending) != text, name


@pytest.mark.cases(len(FILES))
@pytest.mark.parametrize("name", FILES)
def test_every_key_is_carried_over_or_listed(name: str, tmp_path: Path) -> None:
    """What is printed changes without the key, or its line says why it has no effect."""
    ending, values = FILES[name]
    require_every_key(tmp_path, values, ending)


@pytest.mark.skipif(TEMPLATES is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", range(4))
def test_every_key_of_deepspeeds_templates(stage: int, tmp_path: Path) -> None:
    """The templates that DeepSpeed's autotuning ships, read from the installed package."""
    assert TEMPLATES is not None and TEMPLATES.origin is not None
    folder = Path(TEMPLATES.origin).parent / "autotuning/config_templates"
    values = json.loads((folder / f"template_zero{stage}.json").read_text())
    require_every_key(tmp_path, values, "json")


def test_what_is_not_done_has_the_interval_zero(tmp_path: Path) -> None:
    """Without checkpoint.enable, torchtitan saves at the end alone; use_cpu of accelerate: cpu."""
    ending, values = FILES["nothing saved or validated"]
    train = imported(written(tmp_path, values, ending))[0].values["train"]
    assert (train["save_every"], train["eval_every"]) == (0, 0)
    ending, values = FILES["processors"]
    assert imported(written(tmp_path, values, ending))[0].values["run"] == {"device": "cpu"}


def fsdp(**keys: Any) -> dict[str, Any]:
    return LAUNCHED | {"fsdp_config": keys}


def axes(**sizes: int) -> dict[str, Any]:
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return LAUNCHED | {"parallelism_config": named}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a stage": ("json", {"zero_optimization": {"stage": 7}}, "stage = 7"),
    "a stage in quotes": ("json", {"zero_optimization": {"stage": "3"}}, 'stage = "3"'),
    "a stage that is true": ("json", {"zero_optimization": {"stage": True}}, "stage = true"),
    "no section": ("json", {"zero_optimization": "3"}, "a section of keys"),
    "a section": ("json", {"train_batch_size": {"value": 3}}, "one value for train_batch_size"),
    "no number": ("json", DEEPSPEED | {"train_batch_size": "x"}, 'train_batch_size = "x"'),
    "no microbatches": ("json", DEEPSPEED | {"gradient_accumulation_steps": 0}, "from 1 up"),
    "no switch": ("json", {"bf16": {"enabled": "yes"}}, 'bf16.enabled = "yes"'),
    "a device": (
        "json",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "tape"}}},
        "cpu, nvme or none",
    ),
    "a ratio": (
        "json",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 2}}},
        "a number from 0 to 1",
    ),
    "betas": ("json", {"optimizer": {"params": {"betas": [0.9]}}}, "two numbers"),
    "no section of FSDP": ("yaml", LAUNCHED | {"fsdp_config": 3}, "fsdp_config = 3"),
    "a strategy": ("yaml", fsdp(fsdp_sharding_strategy="FULL"), 'fsdp_sharding_strategy = "FULL"'),
    "resharding": ("yaml", fsdp(fsdp_reshard_after_forward=3), "fsdp_reshard_after_forward = 3"),
    "a precision": ("yaml", LAUNCHED | {"mixed_precision": "int3"}, 'mixed_precision = "int3"'),
    "no processes": ("yaml", LAUNCHED | {"num_processes": 0}, "num_processes = 0"),
    "hosts of different sizes": (
        "yaml",
        fsdp(fsdp_sharding_strategy="HYBRID_SHARD") | {"num_machines": 3},
        "num_processes 8 on num_machines 3",
    ),
    "axes": ("yaml", axes(dp_shard=3, tp=2), "num_processes = 8 with the axes of the plan 'dp3"),
    "a degree": (
        "toml",
        {"parallelism": {"tensor_parallel_degree": "x"}},
        'tensor_parallel_degree = "x"',
    ),
    "a degree of zero": ("toml", {"parallelism": {"pipeline_parallel_degree": 0}}, "from 1 up"),
    "a mode": ("toml", {"activation_checkpoint": {"mode": "some"}}, 'mode = "some"'),
}


@pytest.mark.cases(len(WRONG))
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused(name: str, tmp_path: Path) -> None:
    """It does not become a plan of the defaults: the key and its value are said."""
    ending, values, said = WRONG[name]
    with pytest.raises(InputError) as error:
        imported(written(tmp_path, values, ending))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_refuses_a_wrong_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one paragraph, and nothing on stdout."""
    file = written(tmp_path, {"zero_optimization": {"stage": 7}}, "json")
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(file)])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert "zero_optimization.stage = 7 in a file of DeepSpeed" in printed.err


def test_a_missing_reader_of_yaml_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to install, and not that the file is broken."""
    file = written(tmp_path, LAUNCHED, "yaml")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InputError) as error:
        imported(file)
    assert str(error.value).count("Given: ") == 1
    assert str(error.value).endswith("Write instead: pip install pyyaml.")
