"""Files of other systems become configurations: each key has an effect or a line that says why."""

import copy
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
from shardwise.migrate.draft import NO_COUNTERPART, SAME, flat
from shardwise.migrate.read import imported
from shardwise.train.config import build
from tests.migrate.files import (
    DEEPSPEED,
    DOCUMENTED,
    FSDP,
    LAUNCHED,
    MEGATRON,
    TITAN,
    axes,
    fsdp,
    launched,
    titan,
    written,
    zero,
)

Case = tuple[str, dict[str, Any], str]
ZERO3 = zero(3) | {"bf16": {"enabled": True}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/mnt/nvme"}
#: (ending, values, plan) of each file
CASES: dict[str, Case] = {
    "ZeRO-3 template": ("json", DEEPSPEED, "zero3 accumulate:4 fp16 offload:optim"),
    "DeepSpeed's documentation": ("json", DOCUMENTED, "zero2 accumulate:4"),
    "ZeRO-3 in bf16": ("json", ZERO3, "zero3 bf16"),
    "parameters in host memory": ("json", zero(3, offload_param=CPU), "zero3 offload:param"),
    "a part of the optimizer's state": (
        *("json", zero(3, offload_optimizer=CPU | {"ratio": 0.3})),
        "zero3 offload:optim=0.3",
    ),
    "ZeRO-Infinity's optimizer": (
        *("json", zero(3, offload_optimizer=NVME)),
        "zero3 offload:optim@disk",
    ),
    "ZeRO-Infinity's parameters": (
        *("json", zero(3, offload_optimizer=NVME, offload_param=NVME)),
        "zero3 offload:param@disk",
    ),
    "AutoTP": ("json", zero(1) | {"tensor_parallel": {"autotp_size": 2}}, "tp2 zero1"),
    "stage 0": ("json", zero(0), "ddp"),
    "Ulysses": ("json", {"sequence_parallel_size": 2}, "cp2:ulysses"),
    "FSDP 1": ("yaml", launched(fsdp_config=FSDP), "zero3 recompute:full bf16"),
    "FSDP 1 with CPUOffload": (
        *("yaml", launched(fsdp_config=FSDP | {"fsdp_offload_params": True})),
        "zero3 bf16 recompute:full offload:param",
    ),
    "FSDP 2": ("yaml", fsdp(version=2, reshard_after_forward=False), "zero2 bf16"),
    "hybrid": (
        *("yaml", fsdp(sharding_strategy="HYBRID_SHARD") | {"num_machines": 2}),
        "dp_replicate2 dp_shard4 zero3 bf16",
    ),
    "DeepSpeed plugin": (
        *("yaml", launched(deepspeed_config={"zero_stage": 2, "gradient_accumulation_steps": 2})),
        "zero2 accumulate:2 bf16",
    ),
    "Megatron": (
        *("yaml", launched(megatron_lm_config=MEGATRON)),
        "tp2 pp2 zero1 sp 1f1b:4 recompute:selective bf16",
    ),
    "axes": (
        *("yaml", fsdp(reshard_after_forward=True) | axes(dp_replicate=2, dp_shard=2, tp=2, cp=1)),
        "dp_replicate2 dp_shard2 tp2 zero3 bf16",
    ),
    "processors": ("yaml", launched(use_cpu=True, mixed_precision="no"), "fp32"),
    "llama3 8B": ("toml", TITAN, "tp8 zero3 sp recompute:selective bf16"),
    "rings": (
        *("toml", titan(context_parallel_degree=4, tensor_parallel_degree=1)),
        "cp4 zero3 recompute:selective bf16",
    ),
    "a pipeline": (
        "toml",
        titan(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B",
              tensor_parallel_degree=1, fsdp_reshard_after_forward="default"),
        "pp2 zero2 1f1b:4 recompute:selective bf16",
    ),
    "nothing saved or validated": (
        "toml",
        TITAN | {"checkpoint": {"enable": False, "interval": 500},
                 "validation": {"enable": False, "freq": 5}},
        "tp8 zero3 sp recompute:selective bf16",
    ),
}  # fmt: skip


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


@pytest.mark.cases(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    """Of the plan expected, which runs; without a key it differs, or the key has a line."""
    ending, values, expected = CASES[name]
    draft, project = imported(written(tmp_path, values, ending))
    assert Plan.parse(draft.plan) == Plan.parse(expected)
    assert problems(Plan.parse(draft.plan)) == []
    text = draft.toml("config", project)
    assert build(tomllib.loads(text)).plan.text == draft.plan
    for key, _, why in draft.left:
        assert why and f"knows of {project}" not in why
        assert key in text if why == NO_COUNTERPART else f"#   {key} = " in text and why in text
    for key in {key for key, _ in flat(values)} - {key for key, _, _ in draft.left}:
        assert output(tmp_path, without(values, key), ending) != text, key


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
    ending, values, _ = CASES["nothing saved or validated"]
    train = imported(written(tmp_path, values, ending))[0].values["train"]
    assert (train["save_every"], train["eval_every"]) == (0, 0)
    ending, values, _ = CASES["processors"]
    assert imported(written(tmp_path, values, ending))[0].values["run"] == {"device": "cpu"}


SHARDED = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
LION = {"type": "Lion", "params": {"lr": 1e-4}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}
#: (ending, values, plan, values of [train]) of files that leave most keys out
BARE: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        *("toml", {"model": {"name": "llama3", "flavor": "70B"}}, "zero3 bf16 recompute:every2"),
        {"steps": 10000, "lr": 8e-4, "warmup": 200, "decay": "linear", "final": 0.0},
    ),
    # without FSDP, torchtitan is in fp32 beside tensor parallelism
    (
        *("toml", {"parallelism": SHARDED}, "tp2 sp recompute:every2"),
        {"save_every": 0, "eval_every": 0},
    ),
    ("json", zero(1), "zero1", {"clip": 0.0, "warmup": 0}),
    ("json", {"optimizer": LION}, "", {"optimizer": "lion", "lr": 1e-4, "weight_decay": 0.0}),
    (
        *("json", {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}}, ""),
        {"optimizer": "adafactor", "lr": 0.01},
    ),
    (
        *("json", {"scheduler": COSINE}, ""),
        {"steps": 5000, "warmup": 1000, "decay": "cosine", "final": 0.0001},
    ),
    ("yaml", {"distributed_type": "FSDP"}, "zero3", {}),
    ("yaml", {"fsdp_config": {"fsdp_version": 2}}, "zero3", {}),
    ("yaml", {"deepspeed_config": {"gradient_clipping": 1.0}}, "zero2", {"clip": 1.0}),
    ("yaml", {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}, "dp2 zero3", {}),
]


@pytest.mark.cases(len(BARE))
@pytest.mark.parametrize(("ending", "values", "plan", "train"), BARE)
def test_what_a_file_leaves_out_is_the_other_system_s_default(
    ending: str, values: dict[str, Any], plan: str, train: dict[str, Any], tmp_path: Path
) -> None:
    """Where Shardwise has another default; each has a line that says so."""
    draft, project = imported(written(tmp_path, values, ending))
    assert Plan.parse(draft.plan) == Plan.parse(plan)
    assert {**draft.values.get("train", {}), **train} == draft.values.get("train", {})
    text = draft.toml("config", project)
    assert build(tomllib.loads(text)).plan.text == draft.plan
    assert draft.assumed
    for key, _, why in draft.assumed:
        assert f"#   {key} = " in text.partition("has other defaults")[2] and why in text


@pytest.mark.parametrize("kind", ["Lamb", "MuAdamW"])
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


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("values", "word", "left"),
    [
        # parameters rest in host memory by an older key, which comes later
        (
            zero(3, offload_optimizer=CPU | {"ratio": 0.3}, cpu_offload_params=True),
            "offload:param",
            "zero_optimization.offload_optimizer.ratio",
        ),
        # the ratio is of the updates on the host, which those on a disk all are
        (
            zero(3, offload_optimizer=NVME | {"ratio": 0.5}),
            "offload:optim@disk",
            "zero_optimization.offload_optimizer.ratio",
        ),
        (
            zero(3, offload_optimizer=NVME, offload_param=CPU),
            "offload:optim@disk",
            "zero_optimization.offload_param.device",
        ),
        (zero(3) | {"zero_optimisation": {"stage": 2}}, "zero3", "zero_optimisation.stage"),
    ],
)
def test_a_key_without_an_effect_has_a_line(
    values: dict[str, Any], word: str, left: str, tmp_path: Path
) -> None:
    """A misspelt key among them; the folder on a disk is the optimizer's."""
    draft, _ = imported(written(tmp_path, values, "json"))
    assert word in draft.words
    assert left in [key for key, _, _ in draft.left]
    if "@disk" in word:
        assert draft.values["offload"] == {"folder": "/mnt/nvme"}
        assert len(draft.left) == 1
    if left == "zero_optimisation.stage":
        assert draft.left[-1][2] == NO_COUNTERPART


def test_a_yaml_that_names_a_json_is_read_with_it(tmp_path: Path) -> None:
    """The JSON beside it is carried over; without it, the YAML is refused."""
    named = LAUNCHED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    file = written(tmp_path, named, "yaml")
    with pytest.raises(InputError, match=r"deepspeed_config_file: ds\.json .* does not exist"):
        imported(file)
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    assert Plan.parse(imported(file)[0].plan) == Plan.parse("zero3 bf16")


WRONG: dict[str, Case] = {
    "a stage": ("json", zero(7), "stage = 7"),
    "no section": ("json", {"zero_optimization": "3"}, "a section of keys"),
    "no number": ("json", DEEPSPEED | {"train_batch_size": "x"}, 'train_batch_size = "x"'),
    "no switch": ("json", {"bf16": {"enabled": "yes"}}, 'bf16.enabled = "yes"'),
    "a device": ("json", zero(3, offload_optimizer={"device": "tape"}), "cpu, nvme or none"),
    "a ratio": ("json", zero(3, offload_optimizer={"ratio": 2}), "a number from 0 to 1"),
    "a strategy": ("yaml", fsdp(sharding_strategy="FULL"), 'fsdp_sharding_strategy = "FULL"'),
    "hosts of different sizes": (
        "yaml",
        fsdp(sharding_strategy="HYBRID_SHARD") | {"num_machines": 3},
        "num_processes 8 on num_machines 3",
    ),
    "axes": ("yaml", axes(dp_shard=3, tp=2), "num_processes = 8 with the axes of the plan 'dp3"),
    "a degree of zero": ("toml", {"parallelism": {"pipeline_parallel_degree": 0}}, "from 1 up"),
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


@pytest.mark.cases(7)
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
    """Exit code 2, one paragraph, and nothing on stdout."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(tmp_path / name)])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert said in printed.err and printed.err.count("\n") == 1


def test_the_command_prints_the_configuration(tmp_path: Path, capsys: Any) -> None:
    """What it prints is the file for `shardwise train`."""
    with pytest.raises(SystemExit) as end:
        main(["plan", "--from", str(written(tmp_path, ZERO3, "json"))])
    assert not end.value.code
    assert tomllib.loads(capsys.readouterr().out)["plan"]["text"] == str(Plan.parse("zero3 bf16"))


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
