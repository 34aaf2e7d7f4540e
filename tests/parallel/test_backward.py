"""The backward pass in halves is the whole one: the same gradients, no product made twice."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.ledger import Tally
from shardwise.comm.world import World
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.techniques.pipeline.backward import StageTape
from shardwise.techniques.tensor.apply import lay_out
from shardwise.techniques.tensor.source import table_of
from tests.parallel.layers import KINDS, sequences
from tests.parallel.passes import STAGES, calls, given, gradients, made
from tests.parallel.test_tensor import same
from tests.pool import run_threads


def whole(tape: StageTape, grads: list[Tensor]) -> list[Tensor | None]:
    return tape.backward(grads)


def halves(tape: StageTape, grads: list[Tensor]) -> list[Tensor | None]:
    found, rest = tape.inputs(grads)
    rest.weights()
    return found


WAYS = pytest.mark.parametrize("play", [whole, halves], ids=["B", "I and W"])


def assert_near(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    assert (found is None) == (wanted is None), what
    if found is not None and wanted is not None:
        assert float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max())), (
            what
        )


def by_autograd(name: str) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """The gradients of the given and of the parameters, by the usual backward pass."""
    module, xs = made(name), given(name)
    outputs = [y for y in module(*xs) if y.requires_grad]
    torch.autograd.backward(outputs, gradients(outputs))
    return [x.grad for x in xs], {n: p.grad for n, p in module.named_parameters()}


@WAYS
@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_those_of_autograd(name: str, play: Callable[..., Any]):
    """Every given and every parameter gets its gradient; a parameter's hook is called once."""
    module, xs = made(name), given(name)
    hooks: Counter[str] = Counter()
    for n, p in module.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, n=n: hooks.update([n]))
    outputs = [y for y in module(*xs) if y.requires_grad]
    tape, grads = StageTape(xs, outputs), gradients(outputs)
    del outputs  # the tape alone holds the graph
    found = play(tape, grads)
    wanted, weights = by_autograd(name)
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_near(a, b, f"given {k}")
    assert all(x.grad is None for x in xs)
    for n, p in module.named_parameters():
        assert_near(p.grad, weights[n], n)
    once = (
        {}
        if name == "recomputed, reentrant"
        else {n: 1 for n, g in weights.items() if g is not None}
    )
    assert name == "recomputed, reentrant" or hooks == once


@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_added_to_what_is_there(name: str):
    """A second microbatch's gradients are added to the first one's."""
    module, (_, weights) = made(name), by_autograd(name)
    for _ in range(2):
        xs = given(name)
        outputs = [y for y in module(*xs) if y.requires_grad]
        halves(StageTape(xs, outputs), gradients(outputs))
    for n, p in module.named_parameters():
        wanted = weights[n]
        assert_near(p.grad, None if wanted is None else 2 * wanted, n)


@pytest.mark.parametrize("name", STAGES)
def test_i_leaves_the_weights_to_w(name: str):
    """After I no parameter has a gradient, but where it is told that I is all of B."""
    module, xs = made(name), given(name)
    outputs = [y for y in module(*xs) if y.requires_grad]
    StageTape(xs, outputs).inputs(gradients(outputs))
    got = any(p.grad is not None for p in module.parameters())
    assert got == (name in ("recomputed, reentrant", "recomputed branch"))


@WAYS
def test_a_stage_that_is_given_nothing_to_differentiate(play: Callable[..., Any]):
    """The first stage: None for the given, and all the weights' gradients."""
    module = made("layers")
    (x,) = given("layers")
    (y,) = module(x.detach())
    assert play(StageTape([x.detach()], [y]), gradients([y])) == [None]
    for n, p in module.named_parameters():
        assert_near(p.grad, by_autograd("layers")[1][n], n)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
        )
        return func(*args, **(kwargs or {}))


def products(act: Callable[[], Any]) -> tuple[int, Any]:
    with Products() as mode:
        out = act()
    return mode.count, out


@pytest.mark.parametrize(
    ("name", "counts"),
    {
        "layers": (2, 2, 2),
        "two given": (2, 2, 2),
        "layer used twice": (2, 4, 0),
        "stack of experts": (3, 3, 3),
        "weight norm": (1, 1, 1),
        "in place": (1, 1, 1),
        "only of weights": (1, 0, 2),
        "embedding": (1, 1, 1),
        "custom function": (4, 6, 2),
        "frozen": (2, 2, 1),
    }.items(),
)
def test_no_product_is_made_twice(name: str, counts: tuple[int, int, int]):
    """Of a linear layer F, I and W make one product each; a custom Function makes all in I."""
    module, xs = made(name), given(name)
    f, outputs = products(lambda: [y for y in module(*xs) if y.requires_grad])
    tape = StageTape(xs, outputs)
    i, (_, rest) = products(lambda: tape.inputs(gradients(outputs)))
    w, _ = products(rest.weights)
    assert (f, i, w) == counts
    assert calls(module)["product"] in (0, 2)


def test_activations_are_made_again_once():
    """Under checkpointing I makes them, and W has no need of them."""
    module, xs = made("recomputed"), given("recomputed")
    outputs = list(module(*xs))
    _, rest = StageTape(xs, outputs).inputs(gradients(outputs))
    assert calls(module)["made"] == 2
    rest.weights()
    assert calls(module)["made"] == 2


def test_tensors_that_hooks_hold_are_fetched_once_a_half():
    """What was saved under hooks of the user's is right, and asked for no more than twice."""
    module, xs, fetched = made("layers"), given("layers"), Counter()

    def fetch(held: tuple[int, Tensor]) -> Tensor:
        fetched.update([held[0]])
        return held[1]

    with torch.autograd.graph.saved_tensors_hooks(lambda x: (id(x), x), fetch):
        outputs = list(module(*xs))
    halves(StageTape(xs, outputs), gradients(outputs))
    for n, p in module.named_parameters():
        assert_near(p.grad, by_autograd("layers")[1][n], n)


@WAYS
def test_hooks_on_tensors_change_gradients_once(play: Callable[..., Any]):
    """A hook on a gradient inside a stage, or on a parameter's, changes it as it always does."""

    def hooked(module: Any) -> list[Tensor]:
        y = module.a[0](xs[0])
        y.register_hook(lambda g: 2 * g)
        module.a[0].bias.register_hook(lambda g: 3 * g)
        return [module.a[3](module.a[2](y))]

    module, xs = made("layers"), given("layers")
    outputs = hooked(module)
    (found,) = play(StageTape(xs, outputs), gradients(outputs))
    got = {n: p.grad for n, p in module.named_parameters()}
    module, xs = made("layers"), given("layers")
    outputs = hooked(module)
    torch.autograd.backward(outputs, gradients(outputs))
    assert_near(found, xs[0].grad, "given")
    for n, p in module.named_parameters():
        assert_near(got[n], p.grad, n)


@WAYS
@pytest.mark.parametrize("name", STAGES)
def test_nothing_of_the_graph_is_left(name: str, play: Callable[..., Any]):
    """With the tape played, nothing that the forward pass made or was given is alive."""
    gc.disable()
    try:
        module, xs = made(name), given(name)
        seen: list[weakref.ref[Any]] = []

        def note(_: nn.Module, __: Any, out: Any) -> None:
            seen.extend(weakref.ref(y) for y in out if isinstance(y, Tensor))

        for part in module.modules():
            part.register_forward_hook(
                lambda m, a, y: note(m, a, y if isinstance(y, tuple) else (y,))
            )
        outputs = [y for y in module(*xs) if y.requires_grad]
        seen += [weakref.ref(x) for x in xs]
        tape, grads = StageTape(xs, outputs), gradients(outputs)
        del xs, outputs
        play(tape, grads)
        assert [r for r in seen if r() is not None] == []
    finally:
        gc.enable()


def in_halves(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    (x.grad,) = halves(StageTape([x], [out]), [out.detach().cos() + out.detach()])
    return out


def at_once(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    (x.grad,) = whole(StageTape([x], [out]), [out.detach().cos() + out.detach()])
    return out


CUT = ["gated", "gathered output, split input", "recomputed"]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", CUT)
def test_layers_that_are_cut_over_ranks(name: str, sp: bool):
    """On the tensor axis the halves give what one process computes with the layers whole."""
    run_threads(2, same, name, sp, in_halves)


def sent(world: World, name: str, act: Callable[..., Any]) -> Tally:
    model, here = KINDS[name].model(), world.on(Mesh(((TENSOR, world.size),)))
    lay_out(model, here, True, table_of(model))
    x, _ = sequences(0)
    act(model, x.clone().requires_grad_())
    return sum(here.ledger.lines.values(), start=Tally())


@pytest.mark.parametrize("name", CUT)
def test_the_halves_send_what_the_whole_sends(name: str):
    """I and W together have as many messages, and bytes, as B."""
    assert run_threads(2, sent, name, in_halves) == run_threads(2, sent, name, at_once)
