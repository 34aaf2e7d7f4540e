"""Recomputation, and activations in host memory: dropout, gathers, bytes by tier, what is freed."""

import copy
import gc
import inspect
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.models import gpt
from shardwise.observe.meter import Meter
from shardwise.techniques.recompute.checkpointed import FULL, SELECTIVE, Recomputed
from shardwise.techniques.recompute.choice import chosen
from shardwise.techniques.recompute.host_activations import SMALL_BYTES
from shardwise.techniques.recompute.kept import Generators
from tests.engine.cases import Case, build, regression, rows_task, settled, small_gpt
from tests.engine.zoo import Stack
from tests.pool import run_threads
from tests.verify.micro import Fused


def freed(world: World, normed: bool) -> bool:
    """Whether the block of the other rank is freed when the engine has been built."""
    model = small_gpt()
    for name in ("blocks.0.attn.q", "blocks.1.attn.q") if normed else ():
        weight_norm(model.get_submodule(name))
    other = ref(model.get_submodule(f"blocks.{1 - world.rank}{'.attn.q' * normed}"))
    sw.parallelize(model, "pp2 fp64 1f1b:2 recompute:full", world, loss=gpt.loss)
    if normed:  # its class is in a circle
        gc.collect()
    return other() is None


@pytest.mark.parametrize("normed", [False, True])
def test_a_pipeline_rank_frees_recomputed_layers_of_others(normed: bool):
    """Without waiting for the garbage collector, unless weights are made by a parametrization."""
    gc.disable()
    try:
        assert run_threads(2, freed, normed) == [True, True]
    finally:
        gc.enable()


# --- activations in host memory -----------------------------------------------------------------


def steep(model: nn.Module, batch: Any) -> Tensor:
    """The slope of the output: the backward pass reads again what the first one read."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().mean()


def most(words: str, blocks: int, loss: Any = regression) -> tuple[list[float], Meter, Any]:
    """Losses of two steps, the bytes of the second by tier, and its activations on the host."""
    task = replace(rows_task(lambda: settled(Stack(*(Fused() for _ in range(blocks))))), loss=loss)
    engine = build(alone(), task, Case(f"{words} fp64", units=Fused))
    meter = Meter(engine)
    losses = [engine.step(task.batch(0)).loss]
    with meter:
        losses.append(engine.step(task.batch(1)).loss)
    return losses, meter, engine.recompute.host


def test_two_blocks_are_on_the_device():
    """More blocks need no more of the device; the host keeps those of one microbatch."""
    (plain, *_), (found, few, _) = most("dp1", 4), most("activations:host", 4)
    _, more, _ = most("activations:host", 6)
    _, half, _ = most("activations:host accumulate:2", 6)
    assert found == plain
    assert more.most["activations", "device"] - few.most["activations", "device"] < 2 * SMALL_BYTES
    assert half.most["activations", "host"] <= 4 / 7 * more.most["activations", "host"]
    two, three = (most("activations:host", n, steep)[2].most_fetched_bytes for n in (2, 3))
    assert two == three


# --- one module: what it keeps, what it computes again, what it draws -----------------------------


ROWS, LENGTH, WIDTH = 4, 20, 8


class Block(nn.Module):
    """Attention without a fused kernel, in-place activation, dropout, a keyword, counted calls."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        q, v = self.q(x), self.v(x)
        v = torch.empty_like(v).copy_(v)  # as a message is: the product is read
        self.calls += 1
        self.seen += self.calls
        scale = scale * self.seen
        weights = functional.dropout((q @ q.transpose(-2, -1)).softmax(-1), 0.5, self.training)
        y = functional.relu_(self.out(weights @ v)) * scale
        return x + self.norm(y.flatten(0, 1)).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=x.mean())
        return x


def made(kind: str | None) -> nn.Module:
    """A model, recomputed or not, always of the same weights."""
    torch.manual_seed(0)
    found = Model().double()
    for name in ("blocks.0", "blocks.2") * (kind is not None):
        Recomputed(found.get_submodule(name), kind or FULL, Generators([torch.default_generator]))
    return found


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is Tensor.softmax else out


def passed(model: nn.Module, *, twice: bool = True) -> dict[str, Tensor]:
    """Gradients and buffers after a pass, `twice` backward, and the state of the generator. The
    forward runs in a mode, as that in which models of transformers compute in fp64; a tensor is in
    the place of a parameter.
    """
    torch.manual_seed(1)
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    with Doubled():
        halved = {"blocks.0.q.weight": model.get_parameter("blocks.0.q.weight") / 2}
        loss = functional_call(model, halved, x).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0] if twice else None
    state = {"generator": torch.get_rng_state()}
    loss.backward()
    assert x.grad is not None
    assert first is None or torch.equal(first, x.grad)  # a second backward pass recomputes again
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"x": x.grad} | dict(model.named_buffers()) | state


@pytest.mark.parametrize("kind", [FULL, SELECTIVE])
def test_nothing_but_memory_changes(kind: str):
    """Gradients, statistics and generators are equal to the last bit, also after an exception."""
    expected, model = passed(made(None)), made(kind)
    found = passed(copy.deepcopy(model))
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert torch.equal(x, found[name]), name
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3, WIDTH + 1, dtype=torch.float64))
    calls: list[Any] = []
    block = model.get_submodule("blocks.0")
    block.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(passed(model)["x"], expected["x"])
    assert len(calls) == 1
    assert "scale" in inspect.signature(block.forward).parameters
    assert model.state_dict().keys() == Model().state_dict().keys()


@pytest.mark.parametrize("kind", [FULL, SELECTIVE])
def test_operations_that_are_added(kind: str):
    """Full repeats each product; selective attention's scores, and what was written to in place."""

    def counted(how: str | None) -> int:
        with FlopCounterMode(display=False) as counter:
            passed(made(how), twice=False)
        return counter.get_total_flops()

    layer, scores = 2 * ROWS * LENGTH * WIDTH * WIDTH, 2 * ROWS * LENGTH * LENGTH * WIDTH
    added = layer + scores if kind == SELECTIVE else 3 * layer + 2 * scores
    assert counted(kind) - counted(None) == 2 * added


BLOCKS = {f"blocks.{k}": nn.Identity() for k in range(3)}


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("what", "names"),
    [
        (None, []),
        ("selective", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1,blocks.*.out", ["blocks.0.out", "blocks.1", "blocks.2.out"]),
        ("blocks*", ["blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_which_modules(what: str | None, names: list[str]):
    """Blocks, or the outermost modules of these names; verify holds the words to their counts."""
    found = chosen(Model(), what, BLOCKS)
    assert sorted(found) == names
    assert set(found.values()) <= {SELECTIVE if what == "selective" else FULL}
