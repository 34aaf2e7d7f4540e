"""Sabotages of bytes and memory, each of which a proof refuses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.comm.threads import Threads
from shardwise.comm.transport import Pending
from shardwise.core.moves import price
from shardwise.core.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.parallel.data.flat_gradient import FlatGradient
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.verify import parity
from shardwise.verify.report import Report, report
from tests.pool import run_threads
from tests.verify import micro


def proved(text: str) -> Report:
    """A proof of one step of a small model, on threads."""
    plan = Plan.parse(f"{text} fp64")
    with patch.object(parity, "find", micro.find):
        return report(plan, "gpt", run_threads(plan.size, parity.prove, plan, "gpt", 1))


@contextmanager
def half_price() -> Iterator[None]:
    """Theory takes an all-reduce for half of what it is."""

    def halved(src: Any, dst: Any, numel: int, n: int) -> Any:
        step = price(src, dst, numel, n)
        return replace(step, sent=step.sent / 2) if step.what == "all_reduce" else step

    with patch("shardwise.prediction.traffic.price", halved):
        yield


@contextmanager
def gathered_twice() -> Iterator[None]:
    """The transport makes each gather two times."""
    gather = Threads.all_gather

    def twice(self: Threads, out: Tensor, x: Tensor) -> Pending:
        gather(self, out.clone(), x)
        return gather(self, out, x)

    with patch.object(Threads, "all_gather", twice):
        yield


@contextmanager
def one_more_sum() -> Iterator[None]:
    """A step has an all-reduce that is in no plan."""
    collect = FlatGradient.begin_reduce

    def more(self: FlatGradient) -> None:
        assert self.moves.reduce is not None
        self.moves.reduce.axis.transport.all_reduce(torch.zeros(1000))
        collect(self)

    with patch.object(FlatGradient, "begin_reduce", more):
        yield


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "sabotage"),
    [("dp2", half_price), ("dp2 zero3", gathered_twice), ("dp2 zero1", one_more_sum)],
    ids=["half price", "gathered twice", "one more sum"],
)
def test_bytes_that_are_not_theory(plan: str, sabotage: Callable[[], AbstractContextManager[None]]):
    """The numbers train well and memory is right; only the bytes differ, and it does not hold."""
    with sabotage():
        found = proved(plan)
    assert not found.holds and found.first_difference is None
    assert found.sent["theory"] != found.sent["counted"]
    assert found.memory["theory"] == found.memory["read"]


KEPT: dict[int, list[Any]] = {}


@contextmanager
def cloned() -> Iterator[None]:
    """A copy of each unit is kept, in a list."""
    made = Flat.__init__

    def init(self: Flat, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        KEPT.setdefault(threading.get_ident(), []).append(self.shard.clone())

    with patch.object(Flat, "__init__", init):
        yield
    KEPT.clear()


@contextmanager
def leaking() -> Iterator[None]:
    """Each step keeps all weights of this rank."""
    step = Engine.step

    def leak(self: Engine, batch: Any) -> Any:
        done = step(self, batch)
        KEPT.setdefault(threading.get_ident(), []).append([f.shard.clone() for f in self.flats])
        return done

    with patch.object(Engine, "step", leak):
        yield
    KEPT.clear()


@pytest.mark.full
@pytest.mark.parametrize(("sabotage", "grows"), [(cloned, 1), (leaking, 10 / 3)])
def test_memory_that_is_in_no_category(
    sabotage: Callable[[], AbstractContextManager[None]], grows: float
):
    """The categories are right; what is beside them is found after three steps and after ten."""
    with sabotage():
        found = proved("dp2 zero3")
    read = found.memory["read"]
    weights, after = read["parameters"], "in no category, after step"
    assert not found.holds and found.first_difference is None
    assert found.sent["theory"] == found.sent["counted"]
    assert read[f"{after} 3"] == weights * (1 if grows == 1 else 3)
    assert read[f"{after} 10"] == pytest.approx(grows * read[f"{after} 3"])
    assert "aten.clone" in found.strays


@pytest.mark.full
def test_the_package_as_it_is_holds():
    """Without any of these, under the same plan."""
    found = proved("dp2 zero3")
    assert found.holds and not found.strays
