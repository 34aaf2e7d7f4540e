"""What an engine says to the calls of modules, loops and other libraries."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.world import alone
from shardwise.core.errors import InputError


class MyOpt(torch.optim.SGD):
    """A class of the program's own."""


def made(**options: Any) -> sw.Engine:
    return sw.parallelize(nn.Linear(3, 3), "fp32", alone(), **options)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda engine: engine(torch.ones(2, 3)), "engine.step(batch), or engine.evaluate(batch)"),
        (lambda engine: engine.backward(torch.ones(())), "engine.step(batch), which runs forward"),
        (lambda engine: engine.train(), "engine.step(batch), which trains"),
        (lambda engine: engine.save("folder"), "sw.save(engine, folder)"),
        (lambda engine: engine.state_dict(), "sw.full_state_dict(engine)"),
        (lambda engine: engine.parameters(), "engine.model.parameters()"),
        (lambda engine: engine.evalute(1), "engine.evaluate"),
    ],
)
def test_calls_of_other_libraries_name_the_equivalent(call: Any, instead: str):
    """One paragraph, which a program that asks with hasattr does not see."""
    engine = made()
    with pytest.raises(InputError, match="Write instead: ") as caught:
        call(engine)
    assert f"Write instead: {instead}" in str(caught.value)
    assert not hasattr(engine, "backward") and getattr(engine, "train", None) is None


def test_other_attributes_are_unknown():
    """A name that nothing is like is torch's plain error."""
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'xyzzy'"):
        made().xyzzy  # noqa: B018


@pytest.mark.parametrize("given", [MyOpt, MyOpt([torch.zeros(1)], lr=0.1)], ids=["class", "made"])
def test_a_class_of_the_programs_own_is_not_named_as_torchs(given: Any):
    """The advice has the class as the program wrote it."""
    with pytest.raises(InputError, match=r"optimizer=sw\.Optim\(MyOpt, lr="):
        made(optimizer=given)


@pytest.mark.parametrize("wrap", [sw.DDP, sw.FSDP])
def test_an_error_of_precision_names_the_function_that_was_called(wrap: Any):
    """Masters of 16 bits."""
    with pytest.raises(InputError, match=rf"sw\.{wrap.__name__}\(module\.float\(\)"):
        wrap(nn.Linear(2, 2).half(), precision="bf16")
