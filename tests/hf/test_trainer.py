"""`sw.hf.Trainer` against Trainer alone, and what it makes of each of the TrainingArguments."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.hf import Trainer
from shardwise.hf.shares import PADDING, joined
from shardwise.hf.training_arguments import REFUSED, completed_plan
from tests.house import ROOT
from tests.pool import run_gloo

VOCABULARY, POSITIONS, ROWS = 48, 10, 20
#: What is measured in seconds.
TIMES = ("runtime", "per_second")


def rows_of(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of random tokens, of which the last are not predicted: each row has another number."""
    own, found = torch.Generator().manual_seed(seed), list[dict[str, Tensor]]()
    for row, ids in enumerate(torch.randint(3, VOCABULARY, (count, POSITIONS), generator=own)):
        end = POSITIONS // 2 + row % (POSITIONS // 2)
        labels = ids.masked_fill(torch.arange(POSITIONS) >= end, -100)
        found.append({"input_ids": ids, "labels": labels})
    return found


def counted(trainer: Any) -> Counter[str]:
    """How often each event of a run comes."""
    events, call = Counter[str](), trainer.callback_handler.call_event

    def count(event: str, *args: Any, **kwargs: Any) -> Any:
        events[event] += 1
        return call(event, *args, **kwargs)

    trainer.callback_handler.call_event = count
    return events


def model(kind: str = "llama") -> Any:
    """A model with the same weights in each call; dropout is 0."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=kind == "tied",
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Two epochs, with evaluation and checkpoints."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return TrainingArguments(str(folder), **given | changes)


@dataclass
class Run:
    """What a run leaves: its log, the whole weights on rank 0, and counts of events."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]
    events: dict[str, int]


@contextmanager
def processes(world: World | None) -> Iterator[None]:
    """The environment of a launcher for the ranks of `world`; None: none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (world.rank, world.rank, world.size, "127.0.0.1", 1) if world else ()  # it exists
    states = (AcceleratorState, GradientState, PartialState)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name, raising=False)
        for name, value in zip(names, values, strict=False):
            patch.setenv(name, str(value))
        for state in states:
            state._reset_state()
        yield
        for state in states:
            state._reset_state()


def trained(
    world: World | None,
    folder: str,
    plan: str | None,
    kind: str = "llama",
    changes: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Run:
    """Train and save; `changes` are TrainingArguments, `options` those of Trainer and `train`."""
    options = dict(options or {})
    resume = options.pop("resume_from_checkpoint", None)
    with processes(world if plan else None):
        given: dict[str, Any] = {
            "model": model(kind),
            "args": arguments(folder, **changes or {}),
            "train_dataset": rows_of(ROWS),
            "eval_dataset": rows_of(11, seed=1),
        } | options
        if plan is None:
            trainer: Any = given.pop("trainer", transformers.Trainer)(**given)
        else:
            trainer = given.pop("trainer", Trainer)(**given, plan=plan, world=world)
        events = counted(trainer)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/final")
        if world is not None and world.rank:
            return Run(trainer.state.log_history, {}, events)
        kept = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/final")
        return Run(trainer.state.log_history, kept.state_dict(), events)


def timeless(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in log
    ]


#: (plan, rows of a data rank in a microbatch, microbatches of an update)
PLANS = (("zero3", 4, 1), ("tp2", 8, 1), ("pp2 1f1b:4", 8, 1), ("zero1", 2, 2))


def require_equal(mine: Run, alone: Run) -> None:
    """Logs and weights differ by rounding alone."""
    logs = timeless(mine.log), timeless(alone.log)
    for line, wanted in zip(*logs, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5), wanted["step"]
    assert mine.events == alone.events
    assert mine.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(mine.weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("plan", "rows", "steps"), PLANS)
def test_a_run_equals_that_of_trainer_alone(plan: str, rows: int, steps: int, tmp_path: Path):
    """Every line of the log, the events and the saved weights; the last batches are smaller."""
    kind = "tied" if plan == "zero3" else "llama"
    ranks = 2 if plan.startswith("zero") else 1
    mine = run_gloo(2, trained, str(tmp_path / "plan"), plan, kind, sized(rows, steps))[0]
    alone = trained(None, str(tmp_path / "alone"), None, kind, sized(rows * ranks, steps))
    require_equal(mine, alone)
    assert mine.events["on_substep_end" if steps > 1 else "on_step_end"] > 0


def sized(rows: int, steps: int = 1) -> dict[str, Any]:
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    return dict.fromkeys(sizes, rows) | {"gradient_accumulation_steps": steps}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("plan", "other"), [("zero3", "tp2"), ("pp2 1f1b:4", "pp2 1f1b:4")])
def test_a_run_goes_on_from_its_checkpoint(plan: str, other: str, tmp_path: Path):
    """Under its own plan bit for bit, under another one to rounding."""
    rows = 4 if plan == "zero3" else 8
    whole = run_gloo(2, trained, str(tmp_path / "run"), plan, "llama", sized(rows))[0]
    for next_plan, size in {plan: rows, other: 8}.items():
        options = {"resume_from_checkpoint": str(tmp_path / "run/checkpoint-4")}
        folder = str(tmp_path / next_plan)
        resumed = run_gloo(2, trained, folder, next_plan, "llama", sized(size), options)[0]
        logs = [timeless(run.log)[:-1] for run in (resumed, whole)]  # without the run's mean
        if next_plan == plan:
            assert logs[0] == logs[1]
            assert all(torch.equal(resumed.weights[n], w) for n, w in whole.weights.items())
        for line, wanted in zip(*logs, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5)


def halved(found: Any) -> Any:
    return (found[0] / 2, found[1]) if isinstance(found, tuple) else found / 2


class Halved(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return halved(super().compute_loss(*args, **kwargs))


class HalvedAlone(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return halved(super().compute_loss(*args, **kwargs))


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of tokens that were predicted, over all rows in their order."""
    labels = prediction.label_ids
    guessed = prediction.predictions.argmax(-1)
    weight = np.arange(len(labels))[:, None] * (labels != -100)  # the order matters
    return {"accuracy": float((weight * (guessed == labels)).sum()), "rows": len(labels)}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func` that divides by the number that it is given."""
    logits = outputs["logits"].flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["zero3", "tp2", "pp2 1f1b:4"])
def test_other_losses_and_metrics_equal_those_of_trainer_alone(plan: str, tmp_path: Path):
    """Smoothed labels, a loss of one's own, a function of outputs; metrics without pipelines."""
    rows, metrics = (4 if plan == "zero3" else 8), {"compute_metrics": accuracy}
    metrics = {} if plan.startswith("pp") else metrics
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"label_smoothing_factor": 0.1}, {}, {}),
        ({}, metrics | {"trainer": Halved}, metrics | {"trainer": HalvedAlone}),
        ({}, {"compute_loss_func": summed}, {"compute_loss_func": summed}),
    ]
    for number, (changes, options, options_alone) in enumerate(cases):
        short = changes | {"save_strategy": "no", "num_train_epochs": 1}
        folder = str(tmp_path / f"plan{number}")
        mine = run_gloo(2, trained, folder, plan, "llama", sized(rows) | short, options)[0]
        folder = str(tmp_path / f"alone{number}")
        require_equal(mine, trained(None, folder, None, "llama", sized(8) | short, options_alone))


def test_padded_microbatches_of_an_update_may_have_other_lengths():
    """Shorter rows are padded where the mask and the labels leave them out; others are refused."""
    short, long = (
        {name: torch.ones(2, n) for name in ("labels", "attention_mask")} for n in (3, 5)
    )
    batch = joined([short, long], PADDING)
    assert batch["labels"][0].tolist() == [1, 1, 1, -100, -100]
    assert batch["attention_mask"].sum().item() == 16
    with pytest.raises(InputError, match="padding='max_length'"):
        joined([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], PADDING)


def test_each_field_is_on_the_page():
    """Once; a new version's field fails here until it is decided."""
    known = sorted(field.name for field in fields(TrainingArguments))
    table = (
        (ROOT / "docs/how-to/trainer.md")
        .read_text(encoding="utf-8")
        .partition("## Which arguments")[2]
    )
    rows = re.findall(r"^\| ((?:`\w+`(?: |(?= \|)))+)", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == known and {*REFUSED} <= {*known}


def refused(tmp_path: Path, plan: str = "zero3", **given: Any) -> str:
    """The error of a Trainer with these TrainingArguments or arguments of its own."""
    own = {"optimizers", "model_init", "compute_metrics", "trainer"}
    options = {name: given.pop(name) for name in own & given.keys()}
    kind = options.pop("trainer", Trainer)
    with processes(None), pytest.raises(InputError) as error:
        kind(model(), arguments(tmp_path, **given), train_dataset=rows_of(4), plan=plan, **options)
    return str(error.value)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError


SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.mark.cases(11)
@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"optimizers": (SGD, None)}, "optimizer_cls_and_kwargs"),
        ({"model_init": model}, "model=model_init()"),
        ({"trainer": OwnStep}, "OwnStep.training_step"),
        ({"plan": "pp2", "compute_metrics": accuracy}, "only the last stage"),
        ({"plan": "dp2 zero3"}, "dp2"),  # on one process
        ({"auto_find_batch_size": True, "optim": "adafactor"}, "2 things are wrong with the Train"),
        ({"auto_find_batch_size": True}, "shardwise predict"),
        ({"torch_compile": True}, "sw.parallelize"),
        ({"optim": "adafactor"}, "optim='adamw_torch'"),
        ({"neftune_noise_alpha": 5.0}, "embedding"),
        ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model=False"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(given: dict[str, Any], instead: str, tmp_path: Path):
    """Before anything is built, with what to write instead."""
    assert instead in refused(tmp_path, **given)


def test_the_plan_takes_precision_and_microbatches_of_the_arguments(tmp_path: Path):
    """`bf16` and `gradient_accumulation_steps` are words of the plan; both at once is an error."""
    with processes(None):
        args = arguments(tmp_path, bf16=True, gradient_accumulation_steps=4)
    assert completed_plan(args, Plan.parse("zero3")) == Plan.parse("zero3 bf16 accumulate:4")
    with pytest.raises(InputError, match="one precision"):
        completed_plan(args, Plan.parse("zero3 fp32"))
    with pytest.raises(InputError, match="one of the two"):
        completed_plan(args, Plan.parse("accumulate:2"))
