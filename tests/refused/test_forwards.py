"""Forward passes that stages cannot follow, named with what does it and what to write instead."""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import InputError
from shardwise.techniques.pipeline.trace.placeholders import layers, twin
from tests.engine.cases import regression
from tests.parallel.between import (
    WIDTH,
    Block,
    Experts,
    LateNorm,
    Stack,
    cut,
    ran,
    rows,
    settled,
    through,
)

TWO = ("blocks.2",)


class Keeper(Block):
    def __init__(self, *of: "Keeper") -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept * 2 + sum(each.kept for each in self.of)


class Split(Block):
    """Asks for numbers, and gives something else than one tensor."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return (x, x * 2, x * 3) if x.sum().item() < 0 else (x, x, x)


def keeps(model: Any, x: Tensor) -> Tensor:
    return through(model, model.before(x)) + model.before.kept


def splits(model: Any, x: Tensor) -> Tensor:
    a, b, c = model.before(x)
    return through(model, a + b + c)


def reads(model: Any, x: Tensor) -> Tensor:
    x = model.blocks[0](x) * 2
    return through(model, x) if x.sum() > 0 else x


def captures(model: Any, x: Tensor) -> Tensor:
    collector = SimpleNamespace(get=lambda: {"attentions": []})
    capturing: Any = SimpleNamespace(_active_collector=collector)
    with patch.dict(sys.modules, {"transformers.utils.output_capturing": capturing}):
        return through(model, x)


def views(model: Any, x: Tensor) -> Tensor:
    """A view taken in one stage is used after the tensor was written to in the next."""
    x = model.blocks[0](x) * 2
    row = x[:, :1]
    y = model.blocks[3](x * 2)
    x.add_(1)
    return y + row + x


def table(model: Any, x: Tensor) -> Tensor:
    """A view of a buffer is written to, and then the buffer read."""
    model.table[0].copy_(model.blocks[0](x)[0, 0])
    return model.blocks[3](x) + model.table.sum()


def early(model: Any, x: Tensor) -> Tensor:
    return model.blocks[0](nn.functional.linear(x, model.blocks[3].up.weight[:6]))


def autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return through(model, x)


def hooks(model: Any, x: Tensor) -> Tensor:
    return through(model, x) + model.stored


def hooked() -> nn.Module:
    """A hook stores an activation on the model that it closes over."""
    model = stack(hooks)
    model.get_submodule("blocks.0").register_forward_hook(lambda *_: vars(model).update(stored=1))
    return model


def late(model: Any, x: Tensor) -> Tensor:
    model.blocks[0].register_full_backward_hook(lambda *_: None)
    return model.blocks[0](x)


def widens(model: Any, x: Tensor) -> Tensor:
    y = model.blocks[0](x)
    return model.blocks[2](model.blocks[1](x)) + y[..., :1]


def changes(model: Any, x: Tensor) -> Tensor:
    x = model.blocks[0](x)
    return through(model, x * 2 if model.training else x + 2)


def reentrant(model: Any, x: Tensor) -> Tensor:
    x = model.blocks[0](x)
    for block in model.blocks[1:]:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def stack(
    forward: Callable[[Any, Tensor], Tensor], *blocks: nn.Module, before: nn.Module | None = None
) -> nn.Module:
    """Four blocks with this forward, of which the first may be others."""
    model: Any = Stack(before=before, glue=forward)
    model.table = nn.Buffer(torch.zeros(2, WIDTH))
    for number, block in enumerate(blocks):
        model.blocks[number] = block
    return settled(model)


FOLLOWED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: stack(splits, before=Split()), r"before, which cannot run on the meta dev"),
    (lambda: stack(reads), r"__bool__ of a tensor that comes from \w*gt\w* after blocks\.0"),
    (
        lambda: settled(LateNorm()),
        r"layer of stage 0, called in stage 1.*before defined after blocks\.3",
    ),
    (lambda: stack(keeps, before=Keeper()), r"no layer has returned.*return x, extra"),
    (
        lambda: stack(through, keeper := Keeper(), Block(), Keeper(keeper)),
        r"blocks\.2, of stage 1, .* blocks\.0, of stage 0, has left .* extra in blocks\.0, and",
    ),
    (lambda: stack(captures), r"returns attentions.*output_attentions=False"),
    (lambda: stack(views), r"__getitem__ after blocks\.0, made in stage 0.*in stage 1"),
    (lambda: stack(table), r"the buffer Stack\.table that .* another tensor.*x\[:, 0\] = y"),
    (lambda: stack(early), r"blocks\.3\.up\.weight, of stage 1, used by __getitem__"),
    (lambda: stack(lambda model, x: model.blocks[0](x)), r"ends in stage 0 of 2, after blocks\.0"),
    (hooked, r"forward hooks on blocks\.0.*the rank of a layer has what its hook stores"),
    (lambda: stack(late), r"backward hook put on blocks\.0 while a pipeline runs"),
    (
        lambda: stack(lambda m, x: functional_call(m, {"blocks.0.mask": x}, (x,))),
        r"blocks\.0\.mask set to a Tensor while a pipeline runs",
    ),
    (lambda: stack(autocast), r"torch\.autocast around blocks\.0"),
]


@pytest.mark.parametrize(("make", "said"), FOLLOWED)
def test_a_forward_that_cannot_be_followed(make: Callable[[], nn.Module], said: str) -> None:
    """It is refused before anything is computed."""
    model = make()
    stages = cut(model, TWO, [0])
    with pytest.raises(InputError, match=said):
        stages.trace(lambda m: regression(m, rows(2)))


RUN: list[tuple[Callable[[], nn.Module], int, str]] = [
    (
        lambda: stack(widens, Experts(WIDTH + 1)),
        0,
        r"blocks\.0, which returns \[2, 5, 7\] .* \[2, 5, 6\]",
    ),
    (lambda: stack(changes), 0, r"reached \w*add\w* in stage 0, .* has \w*mul"),
]


@pytest.mark.parametrize(("make", "stage", "said"), RUN)
def test_a_forward_that_does_not_do_what_was_foreseen(
    make: Callable[[], nn.Module], stage: int, said: str
) -> None:
    """The owner of a layer compares; a rank that comes elsewhere says where it came."""
    model = make()
    stages = cut(model, TWO, [stage])
    trace = stages.trace(lambda m: regression(m, rows(2)))
    given = [torch.zeros(s.shape, dtype=s.dtype) for s in trace.bundles[0]] if stage else []
    model.eval()
    with pytest.raises(InputError, match=said):
        stages.run(stage, trace, given, lambda m: regression(m, rows(2)))


def called_alone() -> None:
    """A model whose second half is on another rank, outside of a run."""
    model = settled(Stack())
    cut(model, TWO, [0])
    model(rows(1)[0])


def twin_of_a_generator() -> None:
    model: Any = Stack()
    model.file = (i for i in range(3))
    twin(model)


INNER = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
CALLS: list[tuple[Callable[[], object], str]] = [
    (partial(layers, Stack(), ("blocks.7",)), r'"blocks\.7", which is no module.*"blocks\.'),
    (partial(layers, Stack(), ("blocks.2", "blocks.1")), r"instead: blocks\.1, blocks\.2"),
    (partial(layers, Stack(), ("blocks.2", "blocks.2")), r"Write instead: blocks\.2\."),
    (partial(layers, Stack(), ("blocks",)), "stage 0, from the first module on, without a layer"),
    (partial(layers, nn.Sequential(INNER, INNER), ["1.1"]), r"has the names 0, 1"),
    (called_alone, r"blocks\.2, which is on another rank"),
    (twin_of_a_generator, "cannot be copied"),
    (
        ran(cut(stack(reentrant), TWO, [1]), 1, rows(2)).result.backward,
        r"blocks\.2, of another rank's tensor.*reentrant=False",
    ),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_stages_are_refused(call: Callable[[], object], said: str) -> None:
    """Starts that do not fit, stand-ins outside of a run, copies that cannot be made."""
    with pytest.raises(InputError, match=said):
        call()
