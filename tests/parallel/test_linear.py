"""Linear layers whose weights are on several ranks, under any use of autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.move import all_reduce, part
from shardwise.comm.transport import Pending
from shardwise.comm.world import World
from shardwise.core.layouts.layouts import tensor_layouts
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.techniques.tensor.apply import lay_out, tensor_spec
from shardwise.techniques.tensor.sharded_logits import Tensors
from shardwise.techniques.tensor.source import table_of
from tests.engine.cases import difference
from tests.parallel.layers import KINDS, Doubled, sequences
from tests.pool import run_threads

SP = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])


def on_ranks(world: World, name: str, sp: bool, prepare: Any = bool) -> tuple[nn.Module, Tensors]:
    model = KINDS[name].model()
    prepare(model)
    return model, lay_out(model, world.on(Mesh(((TENSOR, world.size),))), sp, table_of(model))


def once(model: nn.Module, x: Tensor) -> Tensor:
    """A forward and a backward pass; the gradient of everything is left where it belongs."""
    out = model(x)
    (out * out.detach().cos()).sum().backward()
    return out


def twice_through(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return out


def two_graphs(model: nn.Module, x: Tensor) -> Tensor:
    """Two forward passes, then their backward passes, the first one's first."""
    one, two = model(x), model(2 * x)
    one.square().sum().backward()
    two.sin().sum().backward()
    return two


def after_looking(model: nn.Module, x: Tensor) -> Tensor:
    """The same input went through before: for no gradient, in a pass that is thrown away."""
    with torch.no_grad():
        seen = model(x)
    model(x)
    out = once(model, x)
    assert difference(out.detach(), seen) <= 1e-12
    return out


def by_grad(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the input alone, then that of all."""
    (gx,) = torch.autograd.grad(model(x).square().sum(), x)
    out = once(model, x)
    assert x.grad is not None
    x.grad += gx
    return out


def hooked(model: nn.Module) -> None:
    """Hooks that make something else of what layers give."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda _, __, y: 2 * y.tanh())


def assert_part(name: str, found: Tensor | None, wanted: Tensor | None, largest: float) -> None:
    """The same to ten digits, of the tensor's largest element or a thousandth of all's."""
    assert (found is None) == (wanted is None), name
    if found is None or wanted is None or not wanted.numel():
        return
    assert found.shape == wanted.shape, name
    scale = max(float(wanted.abs().max()), 1e-3 * largest)
    assert float((found - wanted).abs().max()) <= 1e-10 * scale, f"gradient of {name}"


def same(world: World, name: str, sp: bool, act: Any, prepare: Any = bool) -> None:
    """The act on the model on ranks and on the plain one: outputs, gradients of all."""
    model, tensors = on_ranks(world, name, sp, prepare)
    oracle, (rows, _) = KINDS[name].model(), sequences(0)
    prepare(oracle)
    x, y = (rows.clone().requires_grad_() for _ in range(2))
    assert difference(act(model, x).detach(), act(oracle, y).detach()) <= 1e-10
    grads = {n: p.grad for n, p in oracle.named_parameters()}
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    assert_part("the input", x.grad, y.grad, largest)
    held = tensor_layouts(tensor_spec(oracle, table_of(oracle), sp, world.size), world.size)
    for n, p in model.named_parameters():
        layout, grad, wanted = held.get(n), p.grad, grads[n]
        axis = tensors.summed.get(layout.groups) if layout else None
        if axis is not None and axis.size > 1 and grad is not None:
            grad = all_reduce(grad.clone().contiguous(), axis)
        if layout is not None and layout.cut is not None and wanted is not None:
            wanted = part(wanted, layout.cut, world.rank)
        assert_part(n, grad, wanted, largest)


ACTS = [twice_through, two_graphs, after_looking, by_grad, lambda m, x: once(m, x.detach())]


@pytest.mark.cases(4)
@SP
@pytest.mark.parametrize("name", ["another class first", "6 heads, 2 for keys"])
def test_any_use_of_autograd_gives_the_same(name: str, sp: bool):
    """A retained graph, two graphs at once, looks without gradients, hooks that were there."""
    for act in ACTS:
        run_threads(2, same, name, sp, act)
    run_threads(2, same, name, sp, once, hooked)


PLAIN = "biases, norm and residual inside"


def failing_once(world: World, sp: bool) -> None:
    """A pass that breaks off in a layer of rows takes no bias with it."""
    model, (rows, _) = on_ranks(world, PLAIN, sp)[0], sequences(0)
    before = model(rows)
    down = model.get_submodule("blocks.1.down")
    hook = down.register_forward_pre_hook(lambda _, args: (args[0][..., 1:],))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(rows)
    hook.remove()
    assert "blocks.1.down.bias" in dict(model.named_parameters())
    assert torch.equal(model(rows), before)


def watched(world: World, sp: bool) -> None:
    """A gradient that a hook was given stays what it was: the sum over ranks is a copy."""

    def of_another_class(model: nn.Module) -> None:
        model.get_submodule("blocks.1.up").__class__ = Doubled

    model, _ = on_ranks(world, PLAIN, sp, of_another_class)
    seen: list[tuple[Tensor, Tensor]] = []

    def look(_: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(lambda grad: seen.append((grad, grad.clone())))

    model.get_submodule("blocks.1.up").register_forward_pre_hook(look)
    once(model, sequences(0)[0].requires_grad_())
    ((grad, copy),) = seen
    assert torch.equal(grad, copy)


class Keeping(nn.Linear):
    """A layer that looks at its outputs again."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        self.kept = super().forward(input)
        self.copy = self.kept.detach().clone()
        return self.kept


def kept(world: World, sp: bool) -> None:
    """What a layer of rows keeps of its part of the sum stays that part."""
    own = Keeping(13, 10).double()
    model, _ = on_ranks(
        world, PLAIN, sp, lambda model: setattr(model.get_submodule("blocks.1"), "down", own)
    )
    model(sequences(0)[0])
    assert torch.equal(own.kept, own.copy)


class Products(TorchDispatchMode):
    """Notes each product of the shape of a weight."""

    def __init__(self, shape: torch.Size, said: list[str]) -> None:
        super().__init__()
        self.shape, self.said = shape, said

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and made.shape in (self.shape, self.shape[::-1]):
            self.said.append("weight")
        return made


def in_order(world: World, sp: bool) -> None:
    """Weight gradients of a block are made while their input's gradient is on its way."""
    model, tensors = on_ranks(world, "gated", sp)
    transport, said = tensors.axis.transport, list[str]()
    name = "begin_reduce_scatter_along" if sp else "all_reduce"
    begin = getattr(transport, name)

    def noted(*args: Any) -> Any:
        said.append("begin")
        end = begin(*args)
        return Pending([lambda: (said.append("end"), end.wait())[1]])

    loss = model(sequences(0)[0].requires_grad_()).square().sum()
    setattr(transport, name, noted)
    with Products(model.get_parameter("blocks.0.up.weight").shape, said):
        loss.backward()
    head, rows, columns = ["begin", "end"], ["weight"], ["begin", "weight", "weight", "end"]
    assert said == head + 2 * (rows + columns)


@pytest.mark.cases(8)
@SP
@pytest.mark.parametrize("fact", [failing_once, watched, kept, in_order])
def test_layers_on_ranks(fact: Any, sp: bool):
    """Nothing is lost, written over, or waited for too early."""
    run_threads(2, fact, sp)
