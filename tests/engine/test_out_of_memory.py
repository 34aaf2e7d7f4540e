"""When memory runs out in a step, the error says who holds what and which words would help."""

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.engine.meter import Meter
from shardwise.engine.out_of_memory import explained, ran_out, remedies
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


def bounded(world: World, plan: str, share_of_peak: float) -> tuple[str, Any, dict[str, int]]:
    """A step with less memory than it needs: the error, sw.predict's word on remedies, memory."""
    task = gpt_task(rows=8)
    named: dict[str, Any] = {"loss": task.loss, "optimizer": sw.AdamW(lr=1e-3)}
    engine = sw.parallelize(task.make(), plan, world, tokens=task.tokens, **named)
    batches = [share(task.batch(s), engine.data_rank, engine.data_ranks) for s in range(3)]
    engine.step(batches[0])
    with Meter(engine) as meter:
        engine.step(batches[1])
    most = int(share_of_peak * meter.peak_bytes)

    def predictor(changed: Plan) -> Any:
        return sw.predict(task.make(), changed, batches[2], **named)

    try:
        with Meter(engine) as meter, Bounded(meter, most):
            engine.step(batches[2])
    except torch.OutOfMemoryError as error:
        found = remedies(engine.plan, predictor)
        saved = [(str(r.plan), r.stored_bytes, _total(predictor(r.plan))) for r in found]
        before = _total(predictor(engine.plan))
        return str(explained(error, engine, predictor)), (before, saved), engine.memory()
    raise AssertionError("the step found room")


def _total(found: Any) -> int:
    return sum(found.memory.values()) + found.activations


def numbers(text: str, name: str) -> list[int]:
    """The numbers of a line of a table."""
    (line,) = re.findall(rf"^{re.escape(name)}  +(.*)$", text, re.MULTILINE)
    return [int(word.replace(",", "")) for word in line.split() if word != "-"]


def test_the_error_has_who_holds_what_and_what_would_help():
    """A paragraph, the rank's bytes now and predicted, and plans with what they save."""
    ranks = run_threads(2, bounded, "dp2 fp32", 0.9)
    for rank, (text, (before, saved), memory) in enumerate(ranks):
        assert re.match(
            rf"Given: a step of the plan 'dp2 fp32' for which rank {rank} has too", text
        )
        assert f"Write instead: --plan '{saved[0][0]}'" in text
        assert "\n\n" in text and "Traceback" not in text
        for category in ("parameters", "gradients", "optimizer"):
            assert numbers(text, category) == [memory[category]] * 2
        for plan, stored, told in saved:
            assert stored == told
            assert numbers(text, plan) == [stored, before - stored]
        words = [plan for plan, *_ in saved]
        assert {"dp2 zero1 fp32", "dp2 zero2 fp32", "dp2 zero3 fp32"} < {*words}
        assert [stored for _, stored, _ in saved] == sorted(stored for _, stored, _ in saved)
        assert "dp2 fp32 recompute:full" in words and "dp2 fp32 accumulate:2" in words


@pytest.mark.full
def test_gathered_units_are_named():
    """Under zero3 what is gathered when memory runs out is a line of its own."""
    for text, _, memory in run_threads(2, bounded, "dp2 zero3 fp32", 0.9):
        (gathered,) = numbers(text, "gathered")
        assert gathered > 0
        assert numbers(text, "parameters")[0] == memory["parameters"] - gathered
        assert "dp4 zero3 fp32" in text


def test_a_host_without_memory_is_relieved_by_a_disk():
    """Only a disk relieves the host; the device, which it relieves no more, gets no such word."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)])

    def predictor(changed: Plan) -> Any:
        return sw.predict(model, changed, torch.zeros(2, 2048), loss=lambda m, x: m(x).sum())

    def offloads(words: str, *, host: bool) -> list[str]:
        plan = Plan.parse(f"dp2 zero3 fp32 {words}")
        found = [r.plan.offload for r in remedies(plan, predictor, host=host)]
        return [what for what in found if what is not None and what != plan.offload]

    assert offloads("", host=False) == ["param", "optim"]
    assert offloads("", host=True) == ["param@disk", "optim@disk"]
    assert offloads("offload:optim", host=False) == ["param"]
    assert offloads("offload:optim=0.5", host=False) == ["param", "optim"]
    # on a CPU "param" has no second copy of the weights
    assert offloads("offload:optim", host=True) == ["param@disk", "optim@disk", "param"]
    assert offloads("offload:optim@disk", host=False) == ["param@disk"]


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
    assert numbers(str(told.value), "bf16 device_memory:1MiB")[1] > 0
    assert re.search(r"device_memory can be [\d,]+ bytes or more, and under '", str(told.value))
