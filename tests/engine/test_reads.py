"""Programs that read and write parameters outside of the calls that gather them."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.models import hf as hf_models
from tests.engine.cases import difference, refusal
from tests.engine.loops import Side, adam, rows, wrap
from tests.pool import run_gloo, run_threads

WAYS = ["DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]


class Coder(nn.Module):
    """Used through methods; the root has a parameter, and a copy follows a part by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.leave = nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.full((3,), 0.9))
        self.follower = deepcopy(self.enter).requires_grad_(False)
        self.follows = self.limits = self.again = False

    def encode(self, x: Tensor) -> Tensor:
        return self.enter(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.follows:
            code = self.encode(x)
            with torch.no_grad():  # its units are in another state than those just used
                pairs = zip(self.enter.parameters(), self.follower.parameters(), strict=True)
                for ours, its in pairs:
                    its.data = its.data * 0.9 + ours.data * 0.1
                target = self.follower(x)
            return code - target
        if self.limits:
            self.scale.data.clamp_(max=0.5)
            with torch.no_grad():
                self.scale.mul_(0.97)
        if self.again:
            return checkpoint(lambda z: self.leave(self.encode(z)), x, use_reentrant=False)
        return self.leave(self.encode(x))


def build() -> Coder:
    model, own = Coder().double(), torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():  # ranks that are threads share torch's generator
        if name != "scale":
            p.data.uniform_(-0.5, 0.5, generator=own)
    return model


def updates(side: Side, loss_of: Callable[[Any, Tensor], Tensor]) -> None:
    """Three steps; `loss_of(model, rows)` is a mean over rows."""
    optim = adam(side.model)
    for step in range(3):
        loss_of(side.model, torch.cat([rows(step, rank) for rank in side.shares])).backward()
        optim.step()
        optim.zero_grad()


def methods(side: Side) -> None:
    """Forward is never called."""

    def loss(model: Any, x: Tensor) -> Tensor:
        z = model.encode(x)
        return (model.leave(z) - x).square().mean() + 0.1 * z.square().mean()

    updates(side, loss)


def one_part(side: Side) -> None:
    """A head that the loss applies by its weight, which is never called."""
    updates(side, lambda m, x: F.linear(m.encode(x), m.leave.weight, m.leave.bias).square().mean())


def penalty(side: Side) -> None:
    """A term over all parameters, beside what the forward pass gives."""

    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x).square().mean()
        return out + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)

    updates(side, loss)


def limited(side: Side) -> None:
    """The forward pass writes to a weight, with a trace for autograd and without."""
    side.model.limits = True  # type: ignore[assignment]
    updates(side, lambda m, x: m(x).square().mean())


def momentum(side: Side) -> None:
    """The forward pass assigns averages to the weights of a second encoder."""
    side.model.follows = True  # type: ignore[assignment]
    updates(side, lambda m, x: m(x).square().mean())


def watched(side: Side) -> None:
    """Weights are read between backward and update, by a program that logs them."""
    model: Any = side.model
    groups = [{"params": [model.scale], "lr": 0.1}, {"params": model.leave.parameters()}]
    nn.init.constant_(model.leave.weight, 0.3)
    optim = torch.optim.Adam(groups, lr=0.05)
    for step in range(3):
        side.backward(step)
        side.seen.append(float((model.leave.weight.norm() + model.scale.sum()).detach()))
        assert tuple(model.leave.weight.shape) == (6, 3)
        optim.step()
        optim.zero_grad()


def swapped(side: Side) -> None:
    """Averaged weights are assigned for an evaluation, and the trained ones assigned back."""
    optim, named = adam(side.model), dict(side.model.named_parameters())
    averages = {name: p.data.clone() for name, p in named.items()}
    for step in range(3):
        side.backward(step)
        optim.step()
        optim.zero_grad()
        saved = {name: p.data for name, p in named.items()}
        for name, p in named.items():
            averages[name] = 0.5 * averages[name] + 0.5 * p.data
            p.data = averages[name]
        with torch.no_grad():
            side.seen.append(float(side.model(rows(9, 0)).square().sum()))
        for name, p in named.items():
            p.data = saved[name]


def validated(side: Side) -> None:
    """The last forward passes record gradients that nobody asks for."""
    side.model.again = True  # type: ignore[assignment]
    updates(side, lambda m, x: m(x).square().mean())
    side.seen.append(side.model(rows(9, 0)).square().mean().item())


LOOPS = [validated, methods, one_part, penalty, limited, momentum, watched, swapped]


def on_rank(world: World, how: str, loop: Callable[[Side], None]) -> Any:
    model = wrap(how, build(), world)
    side = Side(model, [world.rank], world.size, True)
    loop(side)
    kept = sw.full_state_dict(model)
    return model.state_dict(), kept, side.seen, sw.unwrap(model).state_dict()


@pytest.mark.cases(8)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_program_that_reads_and_writes_parameters_equals_one_process(loop, how):
    """Weights and what the program noted; state_dict, full_state_dict and unwrap agree."""
    ranks = 4 if "HYBRID" in how else 2
    plain = Side(build(), list(range(ranks)), ranks, False)
    loop(plain)
    expected = plain.model.state_dict()
    for rank, (state, kept, seen, unwrapped) in enumerate(run_threads(ranks, on_rank, how, loop)):
        assert seen == pytest.approx(plain.seen, rel=1e-10)
        for found in (state, unwrapped, *([kept] if rank == 0 else [])):
            assert list(found) == list(expected)
            assert max(difference(found[name], expected[name]) for name in expected) <= 1e-10


def fused(model: Any, x: Tensor) -> Tensor:
    """Hidden states, and the weight of a head that is not called."""
    before = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    out = F.linear(model.encode(x), model.leave.weight)
    return out.square().mean() + 0.01 * before + 0.01 * model.leave.bias.square().sum()


def engine(world: World, plan: str, loss: Any, table: Any = None) -> dict[str, Tensor]:
    options = {} if table is None else {"table": table}
    made = sw.parallelize(
        build(), plan, world, optimizer=sw.SGD(lr=0.1), loss=loss, least_unit_bytes=0, **options
    )
    for step in range(3):
        made.step(rows(step, made.data_rank))
    return sw.full_state_dict(made)


@pytest.mark.cases(4)
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_a_loss_that_reads_weights_equals_one_process_under_every_row(plan):
    """In fp64, where the head of the loss is never called."""
    model = build()
    for step in range(3):
        sum(fused(model, rows(step, rank)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.grad is not None):
                p -= 0.1 * p.grad  # type: ignore[operator]
                p.grad = None
    expected, found = model.state_dict(), run_threads(2, engine, f"{plan} fp64", fused)[0]
    assert max(difference(found[name], expected[name]) for name in expected) <= 1e-10


def assigned(world: World, plan: str) -> tuple[list[Tensor], Tensor]:
    made = sw.parallelize(build(), plan, world, optimizer=sw.SGD(lr=0.0), loss=fused)
    made.step(rows(0, world.rank))
    for p in made.model.parameters():
        p.data = torch.full_like(p, 0.25)
    kept = sw.full_state_dict(made)
    loss = made.step(rows(1, world.rank)).loss
    return [*kept.values(), *sw.full_state_dict(made).values()], torch.tensor(loss)


@pytest.mark.parametrize(
    "plan", ["ddp bf16", "zero1", "zero2 bf16", "zero3", "zero3 offload:param"]
)
def test_tensors_assigned_to_the_parameters_of_an_engine_are_its_weights(plan):
    """Those of a checkpoint, of the next step and of fp32 masters."""
    model = build()
    for p in model.parameters():
        p.data = torch.full_like(p, 0.25)
    expected = sum(fused(model, rows(1, rank)) / 2 for rank in range(2))
    values, loss = run_threads(2, assigned, plan)[0]
    assert values
    assert all((value == 0.25).all() for value in values)
    assert float(loss) == pytest.approx(
        torch.as_tensor(expected).item(), rel=1e-2 if "bf16" in plan else 1e-5
    )


def refused(world: World, how: str, write: Callable[[Any], None]) -> str:
    plain = how in WAYS
    made: Any = wrap(how, build(), world) if plain else None
    if not plain:
        made = sw.parallelize(build(), how, world, optimizer=sw.SGD(lr=0.1), loss=fused)
        made.step(rows(0, 0))

    def go_on() -> None:
        write(made if plain else made.model)
        (made if plain else made.step)(rows(1, 0))

    return refusal(go_on)


def reshaped(model: Any) -> None:
    model.scale.data = torch.zeros(7, dtype=torch.float64)


def halved(model: Any) -> None:
    model.half()


def emptied(model: Any) -> None:
    model.scale.data = torch.zeros_like(model.scale.data)


@pytest.mark.parametrize(
    ("how", "write", "said"),
    [
        ("DDP", reshaped, "scale.data = a tensor [7]"),
        ("FULL_SHARD", reshaped, "scale.data = a tensor [7]"),
        ("SHARD_GRAD_OP", halved, "torch.float16"),
        ("zero2 offload:optim", emptied, "masters on another tier"),
    ],
)
def test_an_assigned_tensor_that_does_not_fit_is_refused_by_name(how, write, said):
    """On every rank, before a wrong weight is used."""
    assert all(said in text for text in run_threads(2, refused, how, write))


def part(world: World, load: bool) -> None:
    model: Any = wrap("FULL_SHARD", build(), world)
    state = model.state_dict()
    with pytest.raises(InputError, match="of leave, a part of a sharded module"):
        model.leave.load_state_dict(state) if load else model.leave.state_dict()


@pytest.mark.parametrize("load", [False, True])
def test_the_state_of_a_part_of_a_sharded_module_is_refused(load):
    """It would be that of this rank's pieces."""
    run_threads(2, part, load)


def test_a_weight_that_tensor_ranks_hold_in_parts_is_not_read_outside_of_its_layer():
    """The error names the layer and what to call; its dtype and shape can be read."""

    def loss(model: Any, x: Tensor) -> Tensor:
        assert model.leave.weight.dtype == torch.float64
        return fused(model, x)

    run = partial(run_threads, 2, engine, "tp2 fp64", loss, {"leave": "colwise_gather_output"})
    with pytest.raises(Exception, match=r"leave\.weight, of which each tensor rank holds a part"):
        run()


def generated(world: World, plan: str) -> tuple[Tensor, bool]:
    """This rank's own text, which ends early on one rank, and whether the model knows it is cut."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = hf_models.small_config("llama")
    model: Any = hf.LlamaForCausalLM(config)
    if world.size > 1:
        model = sw.FSDP(model, world=world) if plan == "FSDP" else _engine_model(model, plan, world)
    rows = []
    for rank in [world.rank] if world.size > 1 else [0, 1]:
        ids, ends = torch.tensor([[5, 7 + rank]]), {"max_new_tokens": 3 + 4 * rank}
        out = model.eval().generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **ends)
        rows.append(F.pad(out[0], (0, 9 - out.shape[1])))
    together = "_is_fsdp_managed_module" in vars(model)
    return torch.stack(rows), together


def _engine_model(model: nn.Module, plan: str, world: World) -> Any:
    return sw.parallelize(model, plan, world).model


@pytest.mark.parametrize("plan", ["FSDP", "dp2 zero3"])
def test_texts_of_ranks_end_at_different_lengths(plan: str) -> None:
    """`generate()` of transformers sees that ranks must run equally many passes."""
    [(expected, _)] = run_gloo(1, generated, plan)
    for rank, (row, together) in enumerate(run_gloo(2, generated, plan)):
        assert torch.equal(row[0], expected[rank])
        assert together
