"""Each field of TrainingArguments is honoured, mapped or refused, and a refusal says what to do."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.hf import Trainer
from shardwise.hf.training_arguments import HONOURED, MAPPED, REFUSED, completed_plan
from tests.hf.trainers import Rows, arguments, model, processes

PAGE = Path(__file__).parents[2] / "docs/how-to/trainer.md"


def test_each_field_is_in_one_group_and_on_the_page() -> None:
    """A new version's field fails here until it is decided; the page lists each field once."""
    groups = [*HONOURED, *MAPPED, *REFUSED]
    assert sorted(groups) == sorted(field.name for field in fields(TrainingArguments))
    table = PAGE.read_text(encoding="utf-8").partition("## Which arguments")[2]
    rows = re.findall(r"^\| ((?:`\w+`(?: |(?= \|)))+)", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(groups)


def refused(tmp_path: Path, plan: str = "zero3", **given: Any) -> str:
    """The error of a Trainer with these TrainingArguments or arguments of its own."""
    own = {"optimizers", "model_init", "compute_metrics", "trainer"}
    options = {name: given.pop(name) for name in own & given.keys()}
    kind = options.pop("trainer", Trainer)
    with processes(None), pytest.raises(InputError) as error:
        kind(model(), arguments(tmp_path, **given), train_dataset=Rows(4), plan=plan, **options)
    return str(error.value)


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"activation_checkpointing": True}, "recompute:full"),
        ({"auto_find_batch_size": True}, "shardwise predict"),
        ({"torch_compile": True}, "sw.parallelize"),
        ({"optim": "adafactor"}, "optim='adamw_torch'"),
        ({"train_sampling_strategy": "group_by_length"}, "'random'"),
        ({"neftune_noise_alpha": 5.0}, "embedding"),
        ({"ddp_bucket_cap_mb": 25}, "zero3"),
        ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model=False"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(
    given: dict[str, Any], instead: str, tmp_path: Path
) -> None:
    """Before anything is built, with what to write instead."""
    assert instead in refused(tmp_path, **given)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError


def test_own_optimizers_and_steps_are_refused(tmp_path: Path) -> None:
    """An optimizer of unsharded parameters, a model that is made again, an overridden step."""
    sgd = torch.optim.SGD(model().parameters(), lr=0.1)
    assert "optimizer_cls_and_kwargs" in refused(tmp_path, optimizers=(sgd, None))
    assert "model=model_init()" in refused(tmp_path, model_init=model)
    assert "OwnStep.training_step" in refused(tmp_path, trainer=OwnStep)
    assert "only the last stage" in refused(tmp_path, "pp2", compute_metrics=lambda _: {})


def test_several_refusals_are_one_error(tmp_path: Path) -> None:
    """Each problem has a line."""
    text = refused(tmp_path, auto_find_batch_size=True, optim="adafactor")
    assert text.startswith("2 things are wrong with the TrainingArguments")


def test_the_plan_takes_precision_and_microbatches_of_the_arguments(tmp_path: Path) -> None:
    """`bf16` and `gradient_accumulation_steps` are words of the plan; both at once is an error."""
    with processes(None):
        args = arguments(tmp_path, bf16=True, gradient_accumulation_steps=4)
    assert completed_plan(args, Plan.parse("zero3")) == Plan.parse("zero3 bf16 accumulate:4")
    with pytest.raises(InputError, match="one precision"):
        completed_plan(args, Plan.parse("zero3 fp32"))
    with pytest.raises(InputError, match="one of the two"):
        completed_plan(args, Plan.parse("accumulate:2"))


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    """The plan must fit the processes that a launcher has started."""
    assert "dp2" in refused(tmp_path, "dp2 zero3")
