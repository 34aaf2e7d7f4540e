"""Layers cut over ranks under any use of autograd; tests/engine/test_tensor.py trains each kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.move import all_reduce, part
from shardwise.comm.transport import Pending
from shardwise.comm.world import World
from shardwise.core.layouts.layouts import tensor_layouts
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.techniques.tensor.apply import lay_out, tensor_spec
from shardwise.techniques.tensor.source import table_of
from shardwise.techniques.tensor.tensor_state import Tensors
from tests.engine.cases import difference
from tests.parallel.layers import KINDS, Doubled, sequences
from tests.pool import run_threads

Act = Callable[[nn.Module, Tensor], Tensor]


def cut(
    world: World, name: str, sp: bool, prepare: Callable[[nn.Module], object] = bool
) -> tuple[nn.Module, Tensors]:
    """The model of a kind, prepared, and laid out on all ranks."""
    model = KINDS[name].model()
    prepare(model)
    return model, lay_out(model, world.on(Mesh(((TENSOR, world.size),))), sp, table_of(model))


def plain(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def once(model: nn.Module, x: Tensor) -> Tensor:
    """A forward and a backward pass; the gradient of everything is left where it belongs."""
    out = model(x)
    (out * out.detach().cos()).sum().backward()
    return out


def twice_through(model: nn.Module, x: Tensor) -> Tensor:
    """One graph, gone through two times."""
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


def without_input(model: nn.Module, x: Tensor) -> Tensor:
    """An input that needs no gradient."""
    return once(model, x.detach())


def gradients(
    model: nn.Module, tensors: Tensors, held: dict[str, AxisLayout]
) -> dict[str, Tensor | None]:
    """Every parameter's gradient, partial ones summed as the table of what is held says."""
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        axis, grad = tensors.summed.get(held[name].groups) if name in held else None, p.grad
        if axis is not None and axis.size > 1 and grad is not None:
            grad = all_reduce(grad.clone().contiguous(), axis)
        found[name] = grad
    return found


def assert_part(name: str, found: Tensor | None, whole: Tensor | None, largest: float) -> None:
    """The same to ten digits, of the tensor's largest element or a thousandth of all's."""
    assert (found is None) == (whole is None), name
    if found is None or whole is None:
        return
    assert found.shape == whole.shape, name
    scale = max(float(whole.abs().max()) if whole.numel() else 0.0, 1e-3 * largest)
    worst = float((found - whole).abs().max()) if found.numel() else 0.0
    assert worst <= 1e-10 * scale, f"gradient of {name}"


def same(
    world: World,
    name: str,
    sp: bool,
    act: Act,
    prepare: Callable[[nn.Module], object] = bool,
) -> None:
    """The act on the cut model and on the whole one: outputs, gradients of input and weights."""
    model, tensors = cut(world, name, sp, prepare)
    oracle, (rows, _) = KINDS[name].model(), sequences(0)
    prepare(oracle)
    x, y = plain(rows), plain(rows)
    assert difference(act(model, x).detach(), act(oracle, y).detach()) <= 1e-10
    wanted = {n: p.grad for n, p in oracle.named_parameters()}
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    assert_part("the input", x.grad, y.grad, largest)
    spec = tensor_spec(oracle, table_of(oracle), sp, world.size)
    held = tensor_layouts(spec, world.size)
    for n, grad in gradients(model, tensors, held).items():
        whole, cut_by = wanted[n], held[n].cut if n in held else None
        if cut_by is not None and whole is not None:
            whole = part(whole, cut_by, world.rank)
        assert_part(n, grad, whole, largest)


ACTS = [twice_through, two_graphs, after_looking, by_grad, without_input]
SOME = ["another class first", "6 heads, 2 for keys"]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("act", ACTS)
def test_any_use_of_autograd_gives_the_same(act: Act, name: str, sp: bool):
    """A retained graph, two graphs at once, looks without gradients, the input's gradient alone."""
    run_threads(2, same, name, sp, act)


def hooked(model: nn.Module) -> None:
    """Hooks that make something else of what layers give."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(lambda _, __, y: 2 * y.tanh())


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", SOME)
def test_hooks_that_were_there_before_see_what_the_layer_gives(name: str, sp: bool):
    """Of columns this rank's, of rows the sum, and their gradients go back through the hook."""
    run_threads(2, same, name, sp, once, hooked)


def failing_once(world: World, sp: bool) -> bool:
    """Whether a pass that breaks off in a layer of rows leaves the next as it would have been."""
    model, _ = cut(world, "biases, norm and residual inside", sp)
    rows, _ = sequences(0)
    before = model(rows)
    down = model.get_submodule("blocks.1.down")
    hook = down.register_forward_pre_hook(lambda _, args: (args[0][..., 1:],))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(rows)
    hook.remove()
    there = "blocks.1.down.bias" in dict(model.named_parameters())
    return there and torch.equal(model(rows), before)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_pass_that_breaks_off_takes_no_bias_with_it(sp: bool):
    """The bias that was put aside is back."""
    assert run_threads(2, failing_once, sp) == [True, True]


class Keeping(nn.Linear):
    """A layer that looks at its outputs again."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        self.kept = super().forward(input)
        self.copy = self.kept.detach().clone()
        return self.kept


def kept(world: World) -> bool:
    """Whether what a layer of rows keeps of its part of the sum stays that part."""
    model = KINDS["biases, norm and residual inside"].model()
    own = Keeping(13, 10).double()
    model.get_submodule("blocks.1").down = own
    lay_out(model, world.on(Mesh(((TENSOR, world.size),))), False, table_of(model))
    model(sequences(0)[0])
    return torch.equal(own.kept, own.copy)


def test_what_a_layer_looks_at_again_is_not_written_over():
    """The sum is in memory of its own."""
    assert run_threads(2, kept) == [True, True]


def watched(world: World, sp: bool) -> bool:
    """Whether a gradient that a hook was given is later what it was."""

    def alone(model: nn.Module) -> None:
        model.get_submodule("blocks.1.up").__class__ = Doubled

    model, _ = cut(world, "biases, norm and residual inside", sp, alone)
    seen: list[tuple[Tensor, Tensor]] = []

    def look(_: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(lambda grad: seen.append((grad, grad.clone())))

    model.get_submodule("blocks.1.up").register_forward_pre_hook(look)
    once(model, plain(sequences(0)[0]))
    return len(seen) == 1 and all(torch.equal(grad, copy) for grad, copy in seen)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_gradient_that_somebody_holds_is_not_added_to(sp: bool):
    """The sum over the ranks is made in a copy."""
    assert run_threads(2, watched, sp) == [True, True]


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


def in_order(world: World, sp: bool) -> list[str]:
    """The backward pass of two gated blocks and a head: sums over the ranks, weights' gradients."""
    model, tensors = cut(world, "gated", sp)
    transport, said = tensors.axis.transport, list[str]()
    name = "begin_reduce_scatter_along" if sp else "all_reduce"
    begin = getattr(transport, name)

    def noted(*args: Any) -> Any:
        said.append("begin")
        end = begin(*args)

        def over() -> Any:
            said.append("end")
            return end.wait()

        return Pending([over])

    weight = model.get_parameter("blocks.0.up.weight")
    loss = model(plain(sequences(0)[0])).square().sum()
    setattr(transport, name, noted)
    with Products(weight.shape, said):
        loss.backward()
    return said


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_gradients_of_weights_are_made_beside_the_sum_of_the_inputs(sp: bool):
    """Of both layers of columns of a block: while their input's gradient is on its way."""
    head, rows, columns = ["begin", "end"], ["weight"], ["begin", "weight", "weight", "end"]
    assert run_threads(2, in_order, sp) == [head + 2 * (rows + columns)] * 2
