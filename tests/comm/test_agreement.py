"""Ranks that compare what they are about to do before each call that they join."""

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from shardwise.comm.agreement import AgreeingLinks, Agreement
from shardwise.comm.move import (
    all_gather,
    all_reduce,
    all_to_all,
    begin_receive,
    begin_send,
    broadcast,
    receive,
    reduce_scatter,
    send,
)
from shardwise.comm.world import World, counted_axis, init
from shardwise.core.errors import InputError
from shardwise.core.mesh import Mesh
from tests.plan_runs import run_of
from tests.pool import run_gloo, run_threads
from tests.test_plans import assert_predicted, assert_state

Body = Callable[[World], Any]


def agreeing(body: Callable[..., Any], store: Store | str, world: World, *args: Any) -> Any:
    """`body` in `world`, whose ranks agree before each call by records in `store`."""
    if isinstance(store, str):
        store = PrefixStore(store, dist.distributed_c10d._get_default_store())
    links = AgreeingLinks(world.links, Agreement(store, world.rank, world.size))
    here = links.transport("world", [list(range(world.size))], world.rank)
    everyone = counted_axis("world", [here], world.ledger, world.device)
    try:
        return body(replace(world, links=links, everyone=everyone), *args)
    finally:
        links.agreement.leave()


def on_threads(ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    store = HashStore()
    return run_threads(ranks, lambda world: agreeing(body, store, world, *args))


def on_gloo(ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_gloo(ranks, partial(_named, body, uuid.uuid4().hex), *args)


def _named(body: Callable[..., Any], name: str, world: World, *args: Any) -> Any:
    return agreeing(body, name, world, *args)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def other_kind(world: World) -> None:
    """Both calls are on one line, so that the line is not what tells them apart."""
    call: Callable[..., Any] = all_gather if world.rank else all_reduce
    call(ones(4), world.everyone)


def other_shape(world: World) -> None:
    all_reduce(ones(4 + world.rank), world.everyone)


def other_dtype(world: World) -> None:
    broadcast(ones(4, dtype=torch.float64 if world.rank else torch.float32), world.everyone)


def other_operation(world: World) -> None:
    all_reduce(ones(4), world.everyone, "max" if world.rank else "sum")


def other_root(world: World) -> None:
    broadcast(ones(4), world.everyone, root=world.rank)


def other_counts(world: World) -> None:
    """Rank 0 sends two rows to rank 1, which expects three."""
    out = [3, 1, 1] if world.rank == 1 else [1, 1, 1]
    into = [1, 2, 1] if world.rank == 0 else [1, 1, 1]
    all_to_all(ones(sum(into), 2), world.everyone, out, into)


def other_line(world: World) -> None:
    if world.rank == 0:
        all_reduce(ones(4), world.everyone)
    else:
        all_reduce(ones(4), world.everyone)


def other_message(world: World) -> None:
    """Rank 0 sends three elements, of which rank 1 expects two; rank 2 waits for both of them."""
    if world.rank == 0:
        send(ones(3), world.everyone, 1)
    if world.rank == 1:
        receive(ones(2), world.everyone, 0)
    all_reduce(ones(4), world.everyone)


def one_call_less(world: World) -> None:
    """Rank 0 has left when the others meet."""
    if world.rank:
        all_reduce(ones(4), world.everyone)


def a_circle(world: World) -> None:
    """Each of three ranks waits for a message of the next before it sends its own."""
    receive(ones(1), world.everyone, (world.rank + 1) % world.size)
    send(ones(1), world.everyone, (world.rank - 1) % world.size)


DISAGREEMENTS: dict[Body, list[str]] = {
    other_kind: ["rank 0 in all_reduce of", "ranks 1, 2 in all_gather of"],
    other_shape: ["rank 0 in all_reduce of a tensor of [4] float32", "a tensor of [6] float32"],
    other_dtype: ["[4] float32, root 0", "[4] float64, root 0"],
    other_operation: ["float32, sum", "float32, max"],
    other_root: ["root 0", "root 1", "root 2"],
    other_counts: ["sends [2, 4, 2]", "receives [6, 2, 2]"],
    other_line: ["other_line (test_agreement.py:"],
    other_message: ["rank 0 in send of a tensor of [3]", "rank 1 in receive of a tensor of [2]"],
    one_call_less: ["rank 0 has left the world", "all_reduce"],
    a_circle: ["ranks 0, 1, 2 in receive"],
}


def told(world: World, body: Body, steps: int = 0) -> tuple[str, float]:
    """The error that this rank raises, and the seconds until then."""
    for _ in range(steps):
        all_reduce(ones(1), world.everyone)
    begun = time.monotonic()
    try:
        body(world)
    except InputError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def assert_told(ranks: list[tuple[str, float]], body: Body) -> None:
    texts = {text for text, _ in ranks if text}
    quiet = [rank for rank, (text, _) in enumerate(ranks) if not text]
    assert quiet == ([0] if body is one_call_less else [])
    (text,) = texts  # every rank raises the same error
    assert [part for part in DISAGREEMENTS[body] if part not in text] == []


@pytest.mark.parametrize("body", DISAGREEMENTS, ids=lambda body: body.__name__)
def test_ranks_that_disagree_are_all_told_both_places(body: Body):
    """Each difference is an InputError on every rank, which names the calls and their lines."""
    assert_told(on_threads(3, told, body), body)


@pytest.mark.parametrize("steps", [1, 1000])
def test_processes_that_disagree_are_told_at_any_step(steps: int):
    """At the first step as at the thousandth."""
    assert_told(on_gloo(3, told, other_shape, steps), other_shape)


def mixed(world: World) -> list[float]:
    """All kinds of calls, on two axes, with receives that begin before their sends."""
    on = world.on(Mesh.parse("dp2 tp2"))
    dp, tp = on.axis("dp"), on.axis("tp")
    early = ones(2)
    arriving = begin_receive(early, dp, 1 - dp.rank)
    x = all_reduce(ones(3) * world.rank, tp)
    begin_send(x[:2] + dp.rank, dp, 1 - dp.rank).wait()
    arriving.wait()
    out = [2, 2] if tp.rank else [1, 1]
    rows = all_to_all(ones(3, 2) * world.rank, tp, out, [1, 2])
    part = reduce_scatter(ones(4, 2), tp)
    return [*early.tolist(), rows.sum().item(), part.sum().item()]


def test_ranks_that_agree_compute_as_without_agreement():
    """Nothing is refused, and no number changes."""
    assert on_threads(4, mixed) == run_threads(4, mixed)


PLANS = ["dp2 zero3", "pp2 tp2 sp zero1 zb-h1:2", "dp2 ep2 tp2", "pp2 dp2 1f1b:2 zero2", "cp2 tp2"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("text", PLANS)
def test_a_plan_agrees_in_every_call(text: str):
    """Training, evaluation and a checkpoint of a plan, with agreement before each call."""
    run = run_of(on_threads, text)
    assert_state(run, [rank.state for rank in run.ranks], run.expected.state)
    assert_predicted(run.ranks, "bytes")


def leftovers(world: World) -> int:
    """The keys in the store after a hundred calls more."""
    links = world.links
    assert isinstance(links, AgreeingLinks)
    before = links.agreement.store.num_keys()
    for _ in range(100):
        all_reduce(ones(1), world.everyone)
    return links.agreement.store.num_keys() - before


def test_records_do_not_pile_up():
    """A run of any length leaves a few records in its store."""
    assert max(on_threads(2, leftovers)) < 10


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch):
    """`check` has one value, by argument and by environment."""
    with pytest.raises(InputError, match="check='all'"):
        init("cpu", check="all")
    monkeypatch.setenv("SHARDWISE_CHECK", "1")
    with pytest.raises(InputError, match=r"Write instead: SHARDWISE_CHECK=each\."):
        init("cpu")
