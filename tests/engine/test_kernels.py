"""kernels="torch": every plan trains with torch's own functions, with parity, bytes and memory."""

from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.world import alone
from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.engine import parallelize
from shardwise.kernels import choice
from shardwise.kernels.matmul import BY_TORCH
from shardwise.verify import memory, parity
from shardwise.verify.report import report
from tests.pool import run_threads
from tests.verify import micro

PLANS = (
    *("dp2 zero3", "dp2 zero1 accumulate:2", "dp2 zero3 recompute:full", "tp2 sp", "dp2 tp2"),
    *("pp2 1f1b:4", "pp2 zb-h1:4", "pp2 dp2 zero3 1f1b:4", "dp2 zero2 bf16"),
)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of ours, where torch's were asked for")


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", PLANS)
def test_torch_s_kernels_hold(plan: str, monkeypatch: pytest.MonkeyPatch):
    """The whole proof holds without a kernel of ours."""
    monkeypatch.setitem(parallelize.DEFAULTS, "kernels", "torch")
    monkeypatch.setattr(memory, "READ_AFTER", (1,))
    monkeypatch.setattr(parity, "find", micro.find)
    for name in ("take_over", "fastest", "fused"):
        monkeypatch.setattr(choice, name, refuse)
    read = Plan.parse(plan if plan.endswith("16") else f"{plan} fp64")
    found = report(read, "gpt", run_threads(read.size, parity.prove, read, "gpt", 2))
    assert found.holds, found


def test_kernels_are_an_option():
    """Auto by default; another word is refused with those that there are."""
    made = sw.parallelize(nn.Linear(4, 4), "fp32", alone(), kernels="torch")
    assert (
        made.model is not None and choice.kernels_of("torch", alone().device).products is BY_TORCH
    )
    with pytest.raises(InputError, match=r"kernels='fast'.*auto or torch"):
        sw.parallelize(nn.Linear(4, 4), "fp32", alone(), kernels="fast")
