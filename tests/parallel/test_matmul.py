"""Which library multiplies: the same numbers by each, and the one that is known to be faster."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.kernels import matmul
from shardwise.kernels.fused_linear import MOST_LENGTHS, take_over
from shardwise.kernels.matmul import (
    BY_BOTH,
    BY_ONEDNN,
    BY_TORCH,
    Products,
    by_onednn,
    fastest,
)

CPU = torch.device("cpu")
ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((6, 32), torch.float32),
        ((2, 3, 32), torch.float32),
        ((32,), torch.float32),
        ((0, 32), torch.float32),
        ((5, 32), torch.float64),
        ((5, 32), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_onednn_gives_what_torch_gives(
    shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool, turned: bool
):
    """Of every number of dims, of none too, of a weight that lies the other way, in every dtype."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw).to(dtype)
    kept = torch.randn((32, 24) if turned else (24, 32), generator=draw).to(dtype)
    weight = kept.t() if turned else kept
    bias = torch.randn(24, generator=draw).to(dtype) if with_bias else None
    found, expected = by_onednn(x, weight, bias), functional.linear(x, weight, bias)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@ONEDNN
def test_onednn_is_used_unless_torch_is_told_not_to(monkeypatch: pytest.MonkeyPatch):
    """`torch.backends.mkldnn` is the switch; of fp64 oneDNN has no product."""
    given: list[torch.dtype] = []

    def noted(x: torch.Tensor, *_: object) -> torch.Tensor:
        given.append(x.dtype)
        return x

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    x = torch.ones(2, 2)
    by_onednn(x, x, None)
    by_onednn(x.double(), x.double(), None)
    BY_ONEDNN.multiply(x, x)
    BY_ONEDNN.multiply(x.double(), x.double())
    BY_ONEDNN.add(x.clone(), x, x, 1.0, 1.0)
    BY_ONEDNN.add(x.double(), x.double(), x.double(), 1.0, 1.0)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    by_onednn(x, x, None)
    BY_ONEDNN.add(x.clone(), x, x, 1.0, 1.0)
    assert given == [torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "library", [BY_TORCH, pytest.param(BY_ONEDNN, marks=ONEDNN)], ids=["torch", "onednn"]
)
@pytest.mark.parametrize(("beta", "alpha"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.5), (2.0, -1.0)])
@pytest.mark.parametrize(
    ("count", "width", "overlapping"),
    [(7, 32, False), (7, 16, False), (0, 32, False), (7, 32, True)],
)
def test_products_of_weights_gradients(
    library: Products,
    dtype: torch.dtype,
    beta: float,
    alpha: float,
    count: int,
    width: int,
    overlapping: bool,
):
    """Alone, and added to what is there; of beta 0 what is there may be anything.

    Of no rows too, of more outputs than inputs or fewer, and of rows that overlap.
    """
    draw = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(count, n, generator=draw).to(dtype) for n in (24, width))
    if overlapping:
        x = torch.randn(count + width, generator=draw).to(dtype).unfold(0, width, 1)[:count]
    there = torch.randn(24, width, generator=draw) if beta else torch.full((24, width), torch.nan)
    there = there.to(dtype)
    out = there.clone()
    made = grad.double().t() @ x.double()
    torch.testing.assert_close(library.multiply(grad.t(), x), made.to(dtype))
    library.add(out, grad.t(), x, beta, alpha)
    before = beta * there.double() if beta else 0
    torch.testing.assert_close(out, (before + alpha * made).to(dtype))


@ONEDNN
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("vendor_id : AuthenticAMD\ncpu family\t: 25\nmodel : 17", BY_BOTH),
        ("vendor_id : AuthenticAMD\ncpu family\t: 26\nmodel : 2", BY_ONEDNN),
        ("AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", BY_BOTH),
        ("AMD64 Family 26 Model 36 Stepping 0, AuthenticAMD", BY_ONEDNN),
        ("AuthenticAMD", BY_BOTH),
        ("vendor_id : GenuineIntel\ncpu family\t: 6\nmodel : 85", BY_TORCH),
        ("arm", BY_TORCH),
        ("", BY_TORCH),
    ],
)
def test_onednn_is_for_processors_of_amd(
    monkeypatch: pytest.MonkeyPatch, told: str, expected: Products
):
    """As the system names them, from Zen 5 on for weights too; not for others, nor for GPUs."""
    monkeypatch.setattr(matmul, "_processor", lambda: told)
    assert fastest(CPU) is expected
    assert fastest(torch.device("cuda")) is BY_TORCH


def test_without_the_systems_file_the_interpreter_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """On Windows and macOS."""
    monkeypatch.setattr(matmul, "CPU_INFO", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "x86, AuthenticAMD")
    assert matmul._processor() == "x86, AuthenticAMD"


def test_new_numbers_of_rows_are_left_to_torch():
    """A layer uses the library for the first numbers of rows alone: it keeps code for each."""
    layer, lengths = nn.Linear(256, 256), list[int]()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        lengths.append(len(x))
        return functional.linear(x, weight, bias)

    library = replace(BY_TORCH, linear=linear)
    take_over(layer, library, None, cast("Any", None), {p: p.numel() for p in layer.parameters()})
    for rows in range(1, MOST_LENGTHS + 3):
        layer(torch.ones(rows, 256))
    layer(torch.ones(1, 256))
    assert lengths == [*range(1, MOST_LENGTHS + 1), 1]
