"""Precisions: dtypes of weights, masters, batches and norms; loss scales; loops in 16 bits."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.optimizer.norm import ROW, LossScale, squared_norm
from shardwise.engine.state.full import full_state_dict
from tests.engine.cases import mean_square, settled, squares, vectors
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_the_scale_doubles_after_long_enough():
    """2000 good updates double it, up to 2^24; one overflow starts the count again."""
    scale = LossScale(on=True, first=4.0, patience=3)
    for overflow in (False, False, True, False, False, False, False):
        scale.update(overflow)
    assert (scale.value, scale.good) == (4.0, 1)
    top = LossScale(on=True, first=2.0**24, patience=1)
    top.update(overflow=False)
    assert top.value == 2.0**24
    off = LossScale(on=False)
    off.update(overflow=True)
    assert off.value == 1.0


def test_precision_is_the_plans_and_fp64_reaches_buffers():
    """Each word sets the dtype of parameters, of norms with statistics at least fp32."""
    for word, dtype in {"fp32": torch.float32, "fp64": torch.float64, **HALF}.items():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        engine = sw.parallelize(model, word, sw.init("cpu"))
        wide = torch.float64 if word == "fp64" else torch.float32
        first, second = engine.model.children()
        assert {p.dtype for p in first.parameters()} == {dtype}
        assert {p.dtype for p in second.parameters()} == {wide}
        assert model.get_buffer("1.running_mean").dtype == wide
        assert model.get_buffer("1.num_batches_tracked").dtype == torch.int64


class Pictures(nn.Module):
    """Batch norms, a bare parameter, and time steps that only the code takes."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 6, 1, 1))
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.time, self.head = nn.Linear(2, 6), nn.Linear(6, 6)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        self.seen = [x, when]
        phase = torch.stack([when.sin(), when.cos()], -1)
        h = self.body(x) + self.place + self.time(phase)[..., None, None]
        return self.head(h.mean((2, 3)))


def pictures(step: int, rows: int = 8) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(step)
    when = 257.0 + torch.randint(9, (rows,), generator=own)
    target = torch.randn(rows, 6, generator=own)
    return {"x": torch.randn(rows, 3, 4, 4, generator=own), "when": when, "target": target}


def picture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mean_square(model(batch["x"], batch["when"]), batch["target"])


def of_pictures(world: World, like: nn.Module, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = copy.deepcopy(like), []
    optimizer = sw.SGD(lr=0.1, momentum=0.9)
    engine = sw.parallelize(model, plan, world, optimizer=optimizer, loss=picture_loss)
    for step in range(5):
        losses.append(engine.step(pictures(step)).loss)
        seen: Any = model.seen
        if seen:  # not on other stages
            assert all(x.dtype == torch.float32 for x in seen)
            assert torch.equal(seen[1], pictures(step)["when"][-len(seen[1]) :])
    return losses, full_state_dict(engine)


@pytest.mark.parametrize("plan", ["ddp bf16", "zero3 bf16", "zero1 fp16", "pp2 gpipe:1 bf16"])
def test_the_batch_is_not_rounded_and_batch_norm_trains(plan: str):
    """Time steps reach the model exactly; losses, weights and statistics are near those of fp32."""
    torch.manual_seed(1)  # the gradients of the first step do not overflow in fp16
    like = Pictures()
    losses, state = looped(None, like, "", None)
    found = run_threads(2, of_pictures, like, plan)[0]
    assert found[0] == pytest.approx(losses, rel=0.02)
    assert found[1].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[1][name].float(), value.float(), rtol=0.02, atol=0.02)


class ByHand(nn.Module):
    """A matrix of its own beside a layer, or a product outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.own = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) @ self.own


def test_inputs_are_cast_where_a_layer_takes_them():
    """A module with a matrix of its own casts; an error elsewhere says what to write."""
    x = torch.randn(4, 6)
    for word, batch in {"bf16": x, "fp32": x.double()}.items():
        engine = sw.parallelize(ByHand(), word, sw.init("cpu"), loss=lambda m, b: m(b).mean())
        assert math.isfinite(engine.step(batch).loss)
    wide = sw.parallelize(
        nn.Linear(6, 6), "bf16", sw.init("cpu"), loss=lambda m, b: (b @ m.weight).mean()
    )
    with pytest.raises(sw.InputError, match=r"dtype.*layers, which cast their inputs to bfloat16"):
        wide.step(x)


def sent(world: World, dtype: torch.dtype) -> int:
    plan, x = "zero3 bf16", torch.ones(4, 6, dtype=dtype)
    made = sw.parallelize(make("stack"), plan, world, loss=squares, least_unit_bytes=0)
    return made.step(x).bytes


def test_a_batch_that_layers_cast_gathers_no_more():
    """A wider one, each unit twice, as one in 16 bits; not all units before the pass."""
    assert run_threads(2, sent, torch.float32) == run_threads(2, sent, torch.bfloat16)


@pytest.mark.parametrize("dtype", [*HALF.values(), torch.float32], ids=str)
def test_norms_are_those_of_the_values_in_double(dtype: torch.dtype):
    """Of rows of 65,536 and what is left of one: sums of 16-bit values are not rounded to them."""
    x = torch.rand(2 * ROW + 77, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double().square().sum()
    assert squared_norm(x).dtype == torch.float64
    assert float(squared_norm(x)) == pytest.approx(float(expected), rel=1e-5)


def looped(
    world: World | None, like: nn.Module, how: str, precision: str | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a plain loop over five steps; what is at rest has 32 bits."""
    model, losses = copy.deepcopy(like), []
    if world is not None and how == "DDP":
        sw.DDP(model, world, precision=precision)
    elif world is not None:
        size = 1 if "HYBRID" in how else None
        sw.FSDP(model, how, nn.Linear, world, size, precision=precision)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optim.zero_grad()
        loss = picture_loss(model, pictures(step))
        loss.backward()
        assert {x.dtype for p in model.parameters() for x in (p, p.grad)} == {torch.float32}  # type: ignore[union-attr]
        optim.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if world is not None:
        full = full_state_dict(model)
        assert all(torch.equal(value, state[name]) for name, value in full.items())
        plain = sw.unwrap(model)
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        assert not plain.get_submodule("head")._forward_pre_hooks
    return losses, state


STRATEGIES = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


@pytest.mark.parametrize("precision", HALF)
def test_a_loop_has_masters_in_fp32_under_every_strategy(precision: str):
    """All compute the same in 16 bits, near fp32; state dicts and unwrapped weights are masters."""
    like = Pictures()
    losses, state = looped(None, like, "", None)
    found = [run_threads(2, looped, like, how, precision)[0] for how in STRATEGIES]
    assert found[0][0] != losses and found[0][0] == pytest.approx(losses, rel=0.02)
    for name, value in state.items():
        assert value.dtype == found[0][1][name].dtype
        torch.testing.assert_close(found[0][1][name], value, rtol=0.02, atol=0.02)
        assert all(torch.equal(other[1][name], found[0][1][name]) for other in found)


def beside_torch(world: World, like: nn.Module) -> tuple[list[float], list[float]]:
    """Losses of the same steps under torch's FSDP2, with its policy for mixed precision."""
    mine, theirs = sw.FSDP(copy.deepcopy(like), world=world, precision="bf16"), copy.deepcopy(like)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (world.size,)), mp_policy=policy)
    found = []
    for model in (mine, theirs):
        optim, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            optim.zero_grad()
            x, y = vectors(step, rows=8)
            own = slice(world.rank, None, world.size)
            loss = functional.mse_loss(model(x[own].float()).float(), y[own].float())
            loss.backward()
            optim.step()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


def test_a_loop_in_bf16_computes_what_torchs_fsdp_computes():
    """Weights in bf16 for computation, masters and sums over the ranks in fp32."""
    torch.manual_seed(0)
    like = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 6))
    for mine, theirs in run_gloo(2, beside_torch, like):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_weights_of_16_bits_in_a_loop_are_reported(capfd):
    """A model cast whole gets a line; with precision= it is refused, as no masters are left."""
    world, model = sw.init("cpu"), nn.Linear(4, 4)
    sw.FSDP(copy.deepcopy(model), world=world)
    assert not capfd.readouterr().err
    sw.FSDP(copy.deepcopy(model).bfloat16(), world=world)
    assert 'precision="bf16"' in capfd.readouterr().err
    with pytest.raises(sw.InputError, match=r"module.float\(\)"):
        sw.DDP(model.bfloat16(), world, precision="bf16")


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    """Products in bf16, and the loss in fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch["x"])
    assert out.dtype == torch.bfloat16
    return out.float().square().mean()


def under_autocast(world: World, plan: str) -> list[float]:
    """The losses of three steps, of rows that no bf16 holds."""
    model = settled(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    table = {"0": "colwise", "2": "rowwise"}
    made = sw.parallelize(
        model, plan, world, optimizer=sw.SGD(lr=0.1), loss=autocast_loss, table=table
    )
    x = torch.linspace(-2, 2, 64).view(8, 8).chunk(made.data_ranks)[made.data_rank]
    return [made.step({"x": x}).loss for _ in range(3)]


@pytest.mark.parametrize("plan", ["dp2", "dp2 zero3", "tp2"])
def test_a_loss_may_open_autocast_under_a_plan_in_fp32(plan: str):
    """Its losses are those of one process under autocast, up to rounding in 16 bits."""
    [expected] = run_threads(1, under_autocast, "fp32")
    for losses in run_threads(2, under_autocast, plan):
        assert losses == pytest.approx(expected, rel=2**-7)
