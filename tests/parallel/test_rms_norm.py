"""Root-mean-square norms as one node: the values, gradients and refusals of torch's own."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import alone
from shardwise.kernels import fused_linear
from shardwise.kernels.fused_linear import take_over
from shardwise.kernels.matmul import BY_ONEDNN, BY_TORCH
from shardwise.kernels.rms_norm import fused

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a test are small."""
    monkeypatch.setattr(fused_linear, "LEAST", 1)


def pair(
    shape: int | list[int] = 6, dtype: Any = torch.float64, **options: Any
) -> list[nn.RMSNorm]:
    """Two norms with the same weight, the second computed by our node."""
    plain, ours = (nn.RMSNorm(shape, dtype=dtype, **options) for _ in range(2))
    for norm in (plain, ours):
        if norm.weight is not None:
            norm.weight.data = 1 + 0.2 * numbers(*norm.weight.shape, dtype=dtype)
    sizes = {p: p.numel() for p in ours.parameters()}
    take_over(ours, BY_TORCH, fused(CPU), cast("Any", None), sizes)
    return [plain, ours]


def numbers(*shape: int, dtype: Any = torch.float64, seed: int = 2) -> Tensor:
    """The same in every dtype, to the rounding of fp32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def taken(y: Tensor) -> bool:
    """Whether our node made it."""
    return y.grad_fn is not None and y.grad_fn.name() == "_RMSNormBackward"


def both(norms: list[nn.RMSNorm], x: Tensor, way: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    """What each makes of `x`, with the gradients of its input and weight."""
    found: list[Any] = []
    for norm in norms:
        own = x.clone().requires_grad_()
        y = way(norm, own)
        y.backward(numbers(*y.shape, dtype=y.dtype, seed=3))
        found.append((y.detach(), own.grad, norm.weight.grad))
    return found


def plainly(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


def turned(norm: nn.Module, x: Tensor) -> Tensor:
    """Of an input whose strides are not those of its shape."""
    return norm(x.transpose(0, 1)).transpose(0, 1)


def strided(norm: nn.Module, x: Tensor) -> Tensor:
    """Of an input whose last dim is not the one that lies together."""
    return norm(x.transpose(-1, -2).contiguous().transpose(-1, -2))


def in_place(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x * 2).tanh_()


def twice(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(torch.tanh(norm(x)))


def recomputed(norm: nn.Module, x: Tensor) -> Tensor:
    return cast("Tensor", checkpoint(norm, x, use_reentrant=False))


WAYS = {way.__name__: way for way in (plainly, turned, strided, in_place, twice, recomputed)}


@pytest.mark.parametrize("options", [{}, {"eps": 1e-2}, {"shape": [3, 6]}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_torch(way: str, options: dict[str, Any]):
    """To rounding in fp64, by eps and over the last dims, however it is used."""
    for want, found in zip(*both(pair(**options), numbers(2, 4, 3, 6), WAYS[way]), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)


def test_fp32_is_as_exact_as_torch():
    """Held against fp64, our error in fp32 is no more than torch's and a rounding."""
    exact = both(pair(64), numbers(50, 64), plainly)[0]
    singles = both(pair(64, torch.float32), numbers(50, 64, dtype=torch.float32), plainly)
    for want, torchs, ours in zip(exact, *singles, strict=True):
        error = [(found.double() - want).norm() / want.norm() for found in (torchs, ours)]
        assert error[0] < 2**-21  # the same was computed
        assert error[1] <= error[0] + 2**-24


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_derivatives_are_those_of_the_values(trained: tuple[bool, bool]):
    """First and second ones agree with finite differences, whatever of it is frozen."""
    norm = fused(CPU)
    assert norm is not None
    inputs = [numbers(5, 4), numbers(4, seed=3)]
    for x, needed in zip(inputs, trained, strict=True):
        x.requires_grad_(needed)
    assert torch.autograd.gradcheck(lambda x, w: norm(x, w, 1e-3), inputs)
    assert torch.autograd.gradgradcheck(lambda x, w: norm(x, w, 1e-3), inputs)


def test_the_normalised_input_is_not_kept():
    """Between the passes live the input, the weight and one number a row."""
    kept: list[Tensor] = []
    x = numbers(8, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pair()[1](x)
    assert taken(y)
    assert sorted(t.numel() for t in kept) == [6, 8, 48]


def test_it_is_one_node_in_a_model_of_ours():
    """`sw.DDP` takes norms over; a model of torch's alone keeps its own."""
    plain, ours = (nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6)) for _ in range(2))
    sw.DDP(ours, alone())
    assert [taken(net(torch.ones(2, 6))) for net in (plain, ours)] == [False, True]


def bare(norm: nn.RMSNorm) -> Tensor:
    """Another weight than the one it was wrapped with."""
    norm.weight = nn.Parameter(norm.weight.detach() * 2)
    return norm(numbers(4, 6))


def widened(norm: nn.RMSNorm) -> Tensor:
    return norm(numbers(4, 6, dtype=torch.float32))


def narrowed(norm: nn.RMSNorm) -> Tensor:
    return norm.bfloat16()(numbers(4, 6, dtype=torch.bfloat16))


def cast_by_mode(norm: nn.RMSNorm) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return norm(numbers(4, 6))


def mapped(norm: nn.RMSNorm) -> Tensor:
    return torch.func.vmap(norm)(numbers(4, 6))


def empty(norm: nn.RMSNorm) -> Tensor:
    return norm(numbers(0, 6))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("way", [bare, widened, narrowed, cast_by_mode, mapped, empty])
def test_what_torch_does_otherwise_is_left_to_it(way: Callable[[nn.RMSNorm], Tensor]):
    """Other weights, mixed and narrow dtypes, modes, transforms, and nothing at all."""
    plain, ours = (way(norm) for norm in pair())
    assert not taken(ours)
    assert torch.equal(plain, ours)
    assert plain.dtype == ours.dtype


def test_an_input_that_does_not_fit_gets_torchs_words():
    """The refusal is torch's own."""
    plain, ours = pair()
    for norm in (plain, ours):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            norm(numbers(4, 5))


def test_without_a_weight_or_of_a_class_of_its_own():
    """A norm that has no weight, or computes in a way of its own, is not touched."""

    class Own(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    own = Own(6)
    assert pair(elementwise_affine=False)[1]._forward_pre_hooks == {}
    take_over(own, BY_TORCH, fused(CPU), cast("Any", None), {own.weight: 6})
    assert own._forward_pre_hooks == {}


def test_small_inputs_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    """Below so many elements our node would cost more than it saves."""
    monkeypatch.setattr(fused_linear, "LEAST", 24)
    norm = pair()[1]
    assert [taken(norm(numbers(rows, 6))) for rows in (3, 4)] == [False, True]


def test_gpus_have_kernels_of_their_own():
    """Nothing takes the place of torch's there."""
    assert fused(torch.device("cuda")) is None


def test_many_gradients_at_once_are_those_of_torch():
    """`torch.autograd.functional` may ask for all rows of a Jacobian in one pass."""
    jacobian = torch.autograd.functional.jacobian
    want, found = (jacobian(norm, numbers(2, 6), vectorize=True) for norm in pair())
    torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)


def test_sums_over_many_rows_are_as_exact_as_torchs():
    """Rows are not added up one after another, as a product would."""
    rows = 4096 + 3
    exact, _ = both(pair(8), numbers(rows, 8), plainly)
    singles = both(pair(8, torch.float32), numbers(rows, 8, dtype=torch.float32), plainly)
    error = [((found[2] - exact[2]).norm() / exact[2].norm()).item() for found in singles]
    assert error[1] < 2 * error[0] < 2**-20


def test_an_input_made_without_autograd_is_taken_as_torch_takes_it():
    """What inference mode made cannot be kept by a node of ours."""
    with torch.inference_mode():
        x = numbers(4, 6)
    for want, found in zip(
        *(torch.autograd.grad(n(x).sum(), n.weight) for n in pair()), strict=True
    ):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("before", [True, False])
def test_what_a_hook_asks_of_an_input_is_heard(before: bool):
    """Of its gradient, and that it is to have one; for a large linear layer as for a norm."""
    heard: list[Tensor] = []

    def ask(_: nn.Module, args: Any, y: Any = None) -> None:
        if before:
            args[0].requires_grad_()
        args[0].register_hook(heard.append)

    linear = nn.Linear(256, 256, dtype=torch.float64)
    sizes = {p: p.numel() for p in linear.parameters()}
    take_over(linear, BY_ONEDNN, None, cast("Any", None), sizes)
    for module, width in ((pair()[1], 6), (linear, 256)):
        hook = module.register_forward_pre_hook if before else module.register_forward_hook
        hook(ask)
        x = numbers(4, width).requires_grad_(not before)
        module(x).sum().backward()
        assert heard.pop().shape == x.shape
    assert heard == []


def test_hooks_see_a_norm_as_before():
    """A user's hooks get the values that go in and come out, and may change them."""
    seen: list[Tensor] = []
    plain, ours = pair()
    for norm in (plain, ours):
        norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        norm.register_forward_hook(lambda _, args, y: seen.append(args[0] + y))
    for want, found in zip(*both([plain, ours], numbers(4, 6), plainly), strict=True):
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(*seen)
