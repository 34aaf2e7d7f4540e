from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import InputError
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import layers, twin
from tests.parallel import between
from tests.parallel.between import WIDTH, Stack
from tests.parallel.playing import CPU, check, regression, rows, settled

TWO, FOUR = ("blocks.2",), ("blocks.1", "blocks.2", "blocks.3")


class Reads(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * 2
        return super().forward(x) if x.sum() > 0 else x


class Keeps(Stack):
    """A layer keeps what it made, and the model takes it from there."""

    before: Any

    class Keeper(between.Block):
        """The layer."""

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept * 2

    def __init__(self) -> None:
        super().__init__(before=self.Keeper())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.before(x))
        return x + self.before.kept


class Views(Stack):
    """A view taken in one stage is used after the tensor was written to in the next."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * 2
        row = x[:, :1]
        y = self.blocks[3](x * 2)
        x.add_(1)
        return y + row + x


class Table(Stack):
    """A view of a table is written to, and then the table read."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros_like(x)
        table[:, 0].copy_(self.blocks[0](x)[:, 0])
        self.blocks[3](x)
        return table + x


class Early(Stack):
    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.blocks[3]
        return self.blocks[0](nn.functional.linear(x, last.up.weight[:6]))


class Half(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class Carrier:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Carries(nn.Module):
    """Layers that hand each other an object that nobody knows."""

    class Carry(between.Block):
        """The layer."""

        def forward(self, x: Any) -> Any:
            return Carrier(super().forward(x.x if isinstance(x, Carrier) else x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Carry() for _ in range(3)] + [between.Block()])

    def forward(self, x: Tensor) -> Tensor:
        out: Any = x
        for block in self.blocks[:3]:
            out = block(out)
        return self.blocks[3](x)


class Changes(Stack):
    """It does one thing in training and another out of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return super().forward(x * 2 if self.training else x + 2)


class Autocast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Splits(Stack):
    """A layer that asks for numbers, and gives something else than one tensor."""

    class Split(between.Block):
        """The layer."""

        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return (x, x * 2, x * 3) if x.sum().item() < 0 else (x, x, x)

    def __init__(self) -> None:
        super().__init__(before=self.Split())

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.before(x)
        return super().forward(a + b + c)


FOLLOWED = {
    "several tensors that hang on numbers": (Splits, r"before, which cannot run on the meta dev"),
    "reads a value": (Reads, r"__bool__ of a tensor that comes from \w*gt\w* after blocks\.0"),
    "a layer too late": (
        between.LateNorm,
        r"layer of stage 0, called in stage 1.*before defined after blocks\.3",
    ),
    "a value that a layer keeps": (Keeps, r"no layer has returned.*return x, extra"),
    "memory written to later": (Views, r"__getitem__ after blocks\.0, made in stage 0.*in stage 1"),
    "a view of a table": (Table, r"through another tensor.*x\[:, 0\] = y"),
    "a parameter too early": (Early, r"blocks\.3\.up\.weight, of stage 1, used by __getitem__"),
    "half of the layers": (Half, r"ends in stage 0 of 2, after blocks\.0"),
    "autocast": (Autocast, r"torch\.autocast around blocks\.0"),
}


@pytest.mark.parametrize("model", FOLLOWED)
def test_a_forward_that_cannot_be_followed_is_refused(model: str) -> None:
    """Before anything is computed, naming what does it and what to write instead."""
    make, text = FOLLOWED[model]
    made = settled(make())
    stages = Stages(made, twin(made), TWO, [0], CPU)
    with pytest.raises(InputError, match=text):
        stages.trace(lambda m: regression(m, rows(2)))


class Wider(nn.Module):
    """Experts whose output is not like their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([between.Experts(WIDTH + 1), between.Block(), between.Block()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)) + y[..., :1]


RUN = {
    "an unknown object": (Carries, 1, r"blocks\.2, which takes an object with a value"),
    "experts that change the width": (
        Wider,
        0,
        r"blocks\.0, which returns \[2, 5, 7\] .* \[2, 5, 6\]",
    ),
    "something else each time": (Changes, 0, r"reached \w*add\w* in stage 0, .* has \w*mul"),
}


@pytest.mark.parametrize("model", RUN)
def test_a_forward_that_does_not_do_what_was_foreseen_is_refused(model: str) -> None:
    """The owner of a layer compares; a rank that comes elsewhere says where it came."""
    make, stage, text = RUN[model]
    made = settled(make())
    stages = Stages(made, twin(made), TWO, [stage], CPU)
    trace = stages.trace(lambda m: regression(m, rows(2)))
    given = [torch.zeros(s.shape, dtype=s.dtype) for s in trace.bundles[0]] if stage else []
    made.eval()
    with pytest.raises(InputError, match=text):
        stages.run(stage, trace, given, lambda m: regression(m, rows(2)))


STARTS = {
    "no module": (("blocks.7",), r'"blocks\.7", which is no module.*"blocks\.'),
    "out of order": (("blocks.2", "blocks.1"), r"Write instead: blocks\.1, blocks\.2"),
    "twice": (("blocks.2", "blocks.2"), r"Write instead: blocks\.2\."),
    "the first": (("blocks",), "stage 0, from the first module on, without a layer"),
    "the root": (("",), "which is no module"),
}


@pytest.mark.parametrize("given", STARTS)
def test_starts_that_do_not_fit_are_refused(given: str) -> None:
    """With the nearest name, the right order, or the stage that would be empty."""
    names, text = STARTS[given]
    with pytest.raises(InputError, match=text):
        layers(Stack(), names)


def test_a_start_inside_a_module_with_two_names_is_refused() -> None:
    """One module has one cut."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = nn.Sequential(inner, inner)
    with pytest.raises(InputError, match=r"has the names 0, 1"):
        layers(model, ["1.1"])


def test_a_stand_in_is_called_in_its_stage_only() -> None:
    """Outside of a run a layer of another rank says that it is one."""
    model = settled(Stack())
    Stages(model, twin(model), TWO, [0], CPU)
    with pytest.raises(InputError, match=r"blocks\.2, which is on another rank"):
        model(rows(1)[0])


class Reentrant(Stack):
    """What a reentrant checkpoint gives crosses, and another takes it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            out: Any = checkpoint(block, x, use_reentrant=True)
            x = out
        return x


def test_reentrant_checkpoints_in_a_row_are_refused() -> None:
    """Their recomputation has no tensor of another stage; the other kind of checkpoint does."""
    with pytest.raises(InputError, match=r"blocks\.2, of another rank's tensor.*reentrant=False"):
        check(settled(Reentrant()), regression, [rows(2)], TWO)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    """The reason is told."""
    model: Any = Stack()
    model.file = (i for i in range(3))
    with pytest.raises(InputError, match="cannot be copied"):
        twin(model)
