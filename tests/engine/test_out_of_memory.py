"""When memory runs out in a step, the error says who holds what and which words would help."""

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.engine.checks.out_of_memory import explained, ran_out
from shardwise.observe.meter import Meter
from shardwise.train import loop
from tests.engine.cases import share
from tests.engine.tensors import gpt_task
from tests.pool import run_threads
from tests.train.runs import settings


class Bounded(TorchDispatchMode):
    """A device of so many bytes: an operation after which more are live raises, as CUDA does."""

    def __init__(self, meter: Meter, most_bytes: int) -> None:
        super().__init__()
        self.meter, self.most_bytes = meter, most_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if sum(self.meter.now().values()) > self.most_bytes:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.00 KiB")
        return made


def bounded(world: World, plan: str, share_of_peak: float) -> tuple[str, dict[str, int]]:
    """A step with less memory than it needs: the error, and the memory."""
    task = gpt_task(rows=8)
    named: dict[str, Any] = {"loss": task.loss, "optimizer": sw.AdamW(lr=1e-3)}
    engine = sw.parallelize(task.make(), plan, world, tokens=task.tokens, **named)
    batches = [share(task.batch(s), engine.data_rank, engine.data_ranks) for s in range(3)]
    engine.step(batches[0])
    with Meter(engine) as meter:
        engine.step(batches[1])
    most = int(share_of_peak * meter.peak_bytes)

    try:
        with Meter(engine) as meter, Bounded(meter, most):
            engine.step(batches[2])
    except torch.OutOfMemoryError as error:
        found = sw.predict(task.make(), engine.plan, batches[2], **named)
        return str(explained(error, engine, found)), engine.memory()
    raise AssertionError("the step found room")


def numbers(text: str, name: str) -> list[int]:
    """The numbers of a line of a table."""
    (line,) = re.findall(rf"^{re.escape(name)}  +(.*)$", text, re.MULTILINE)
    return [int(word.replace(",", "")) for word in line.split() if word != "-"]


def test_the_error_has_who_holds_what_and_what_would_help():
    """A paragraph, the rank's bytes now and predicted, and a plan that stores less."""
    ranks = run_threads(2, bounded, "dp2 fp32", 0.9)
    for rank, (text, memory) in enumerate(ranks):
        assert re.match(
            rf"Given: a step of the plan 'dp2 fp32' for which rank {rank} has too", text
        )
        assert "Write instead: --plan 'dp2 fp32 recompute:full', or a smaller model" in text
        assert "\n\n" in text and "Traceback" not in text
        for category in ("parameters", "gradients", "optimizer"):
            assert numbers(text, category) == [memory[category]] * 2


@pytest.mark.full
def test_gathered_units_are_named():
    """Under zero3 what is gathered when memory runs out is a line of its own."""
    for text, memory in run_threads(2, bounded, "dp2 zero3 fp32", 0.9):
        (gathered,) = numbers(text, "gathered")
        assert gathered > 0
        assert numbers(text, "parameters")[0] == memory["parameters"] - gathered


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory: 8 bytes"), True),
        (RuntimeError("The size of tensor a must match"), False),
        (ValueError("no memory was allocated"), False),
    ],
)
def test_what_counts_as_running_out(error: Exception, expected: bool):
    """Errors of devices and of the host; others are raised as they are."""
    assert ran_out(error) is expected


def test_training_ends_with_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """`shardwise train` answers with the tables, as bad input: exit code 2."""

    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(sw.Engine, "step", step)
    with pytest.raises(InputError, match=r"out of memory. Tried to allocate 2.00 GiB\)") as told:
        loop.train(settings(tmp_path / "run", "fp32 device_memory:1MiB"), alone())
    assert "rank 0 stores, bytes" in str(told.value)
