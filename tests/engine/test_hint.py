"""What an engine says to the calls of modules, loops and other libraries."""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.move import move
from shardwise.comm.world import alone
from shardwise.core import R, S
from shardwise.core.errors import InputError

X = torch.ones(2, 3)
AXIS, MOVE = alone().axis("dp"), 'move(x, world.axis("dp"), P, S(0))'
MOE = sw.MoE(8, 16, sw.Gate("topk", experts=4, k=2))


def made(**options: Any) -> sw.Engine:
    return sw.parallelize(nn.Linear(3, 3), "fp32", alone(), **options)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda engine: engine(torch.ones(2, 3)), "engine.step(batch), or engine.evaluate(batch)"),
        (lambda engine: engine.backward(torch.ones(())), "engine.step(batch), which runs forward"),
        (lambda engine: engine.train(), "engine.step(batch), which trains"),
        (lambda engine: engine.state_dict(), "sw.full_state_dict(engine)"),
        (lambda engine: engine.parameters(), "engine.model.parameters()"),
        (lambda engine: torch.no_grad()(engine.step)(X), "engine.step(batch) outside of the block"),
        (lambda engine: sw.no_sync(engine.model).__enter__(), "accumulate:4 in the engine's plan"),
        (lambda engine: sw.clip_grad_norm(engine.model, 1.0), "accumulate:4 in the engine's"),
    ],
)
def test_calls_of_other_libraries_name_the_equivalent(call: Any, instead: str):
    """One paragraph, which a program that asks with hasattr does not see."""
    engine = made()
    with pytest.raises(InputError, match="Write instead: ") as caught:
        call(engine)
    assert f"Write instead: {instead}" in str(caught.value)
    assert not hasattr(engine, "backward") and getattr(engine, "train", None) is None


@pytest.mark.parametrize(
    ("call", "given", "instead"),
    [
        (lambda: sw.clip_grad_norm([X], 1.0), "of [tensor", "sw.clip_grad_norm(nn.Lin"),
        (lambda: sw.full_state_dict(None), "full_state_dict of None", "sw.full_state_dict(nn.Lin"),
        (lambda: sw.derive_table(None, X, 2), "derive_table of None", "sw.derive_table(nn.Lin"),
        (lambda: sw.balance_by_time(None, str, 2), "time of None", "sw.balance_by_time(nn.Lin"),
        (lambda: sw.balance_by_time(nn.Linear(1, 1), X, 2), "call=tensor", "balance_by_time(model"),
        (lambda: sw.balance_by_time(nn.Linear(1, 1), str, 0), "stages=0", "stages=2"),
        (lambda: sw.DDP(nn.Linear(1, 1), broadcast_buffers="no"), "'no'", "broadcast_buffers=True"),
        (lambda: sw.init("cpu", shared_memory="no"), "shared_memory='no'", "shared_memory=True"),
        (lambda: sw.load(made(), "x", missing_ok="no"), "missing_ok='no'", "missing_ok=True"),
        (lambda: alone().on("dp1"), "world.on('dp1')", 'world.on(sw.Mesh.parse("dp2"))'),
        (lambda: alone().axis("dpp"), "axis='dpp'", 'axis="dp"'),
        (lambda: move(3, AXIS, R, S(0)), "with x=3", MOVE),
        (lambda: move(X, None, R, S(0)), "with axis=None", MOVE),
        (lambda: move(X, AXIS, "R", S(0)), "with src='R'", MOVE),
        (lambda: move(X, AXIS, R, S(2)), "2 dims with the placement S2", MOVE),
        (
            lambda: sw.cross_entropy(X, None),
            "targets=None",
            "cross_entropy(model(tokens), targets)",
        ),
        (lambda: MOE(torch.ones(2, 7)), "width 8 with shape (2, 7)", "sw.MoE(width=8, ...)"),
        (lambda: sw.cross_entropy(X[0, 0], X), "without dims", "logits.view(1, -1)"),
        (
            lambda: sw.cross_entropy(X, torch.zeros(2, dtype=torch.long), label_smoothing="x"),
            "label_smoothing='x'",
            "label_smoothing=0.1",
        ),
        (lambda: MOE(torch.ones(2, 8), torch.ones(5)), "target (5,)", "target of shape (2,)"),
        (lambda: MOE(torch.ones(2, 8).long()), "width 8 with", "sw.MoE(width=8, ...)"),
        (lambda: sw.Gate(3, experts=4), 'the gate "3"', "gate = "),
        (lambda: sw.predict(nn.Linear(3, 3), "dp2", X, rank="0"), "rank='0'", "rank=0"),
        (lambda: sw.spawn(str, 2, args=3), "args=3", "spawn(work, 2, args=(3,))"),
        (lambda: sw.save(made(), ""), "folder ''", '"runs/example"'),
        (lambda: sw.save(made(), "a\0b"), "folder 'a", '"runs/example"'),
        (lambda: sw.MoE(8, 16, MOE.gate, shared=3), "shared=3", "shared=nn.Linear(width, width)"),
        (lambda: MOE("x"), "width 8 with 'x'", "sw.MoE(width=8, ...)"),
        (
            lambda: sw.replicas.parallel_apply([None], [X]),
            "of None",
            "parallel_apply(replicas, inputs)",
        ),
        (lambda: S("x"), "S with dim 'x'", "S(0)"),
    ],
)
def test_an_argument_of_another_type_is_one_paragraph(call: Any, given: str, instead: str):
    """Where Python or torch would raise from inside, or one rank would notice nothing."""
    with pytest.raises(InputError, match="Write instead: ") as caught:
        call()
    (problem,) = caught.value.problems
    assert given in problem.given and instead in problem.instead


def test_python_suggests_the_nearest_public_name():
    """A name of the package that does not exist."""
    with pytest.raises(AttributeError, match="no attribute 'parallelise'") as caught:
        sw.parallelise  # noqa: B018
    assert caught.value.name == "parallelise" and "parallelize" in dir(caught.value.obj)


def test_other_attributes_are_unknown():
    """A name that nothing is like is torch's plain error."""
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'xyzzy'"):
        made().xyzzy  # noqa: B018


@pytest.mark.parametrize("wrap", [sw.DDP, sw.FSDP])
def test_an_error_of_precision_names_the_function_that_was_called(wrap: Any):
    """Masters of 16 bits."""
    with pytest.raises(InputError, match=rf"sw\.{wrap.__name__}\(module\.float\(\)"):
        wrap(nn.Linear(2, 2).half(), precision="bf16")
