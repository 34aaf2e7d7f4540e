"""Ranks that differ: in options, weights or states, in what they do, in that they raise."""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import shardwise as sw
from shardwise.agreement import same_on_ranks
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.engine.options import EngineOptions
from shardwise.observe.dry_twin import DryTwin
from tests.engine.cases import Case, build, ranks_of, refusal, rows_task, settled, share, vectors
from tests.engine.cases import squares as loss
from tests.engine.tensors import step_as_predicted
from tests.pool import run_gloo, run_threads

CHANGED = 3  # the step, counted from 0, before which the last rank changes something


class Scaled(nn.Sequential):
    """Layers, and a factor and a word that a program may pass; factors that it keeps."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.factors = {"out": 1.0}

    def forward(self, x: Tensor, factor: float | None = None, _: str = "") -> Tensor:
        kept = self.factors["out"] * float(os.environ.get("FACTOR", "1"))
        return super().forward(x if factor is None else factor * x) * kept


def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(nn.Linear(4, 4), nn.Linear(4, 4))


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def change(world: World, what: str, module: nn.Module, group: dict[str, Any], optim: Any) -> None:
    """On the last rank: an option of a group, weights or masters; no trace but their bits."""
    if world.rank < world.size - 1:
        return
    group |= {"lr": {"lr": 0.5}, "betas": {"betas": (0.5, 0.9)}}.get(what, {})
    if what == "master":
        next(iter(optim.masters.values())).add_(1e-3)
    if what == "states":  # one bit of one number of the last second moment on this rank
        *_, moment = (state["exp_avg_sq"] for state in optim.state.values())
        moment.data.view(-1).view(torch.int32)[-1] ^= 1 << 20
    if what == "weights":
        for p in module.parameters():
            p.data.add_(1.0)


def in_engine(world: World, plan: str, what: str) -> str:
    """When an engine raises what; the bytes of the steps before are those predicted."""
    table = {"0": "colwise", "1": "rowwise"} if "tp" in plan else None
    options: dict[str, Any] = {"optimizer": sw.AdamW(lr=0.01), "loss": loss, "check_every": 2}
    options |= {"table": table}
    engine = sw.parallelize(model(), plan, world, **options)
    dry = DryTwin(model(), engine.plan, EngineOptions(**options), world.rank)
    for step in range(6):
        if step == CHANGED:
            change(world, what, engine.model, engine.optimizer.param_groups[0], engine.optimizer)
        batch = rows(step, engine.data_rank)
        try:
            step_as_predicted(engine, dry, batch)
        except InputError as error:
            return f"step {step}: {error}"
    return ""


LR = "lr of the group 'default' of engine.optimizer on {}: 0.5; on {}: 0.01"
BETAS = "betas of the group 'default' of engine.optimizer on {}: [0.5, 0.9]; on {}: "
#: The axes whose last rank changes something, by plan.
AXES = {
    **dict.fromkeys(["dp2", "dp2 zero1", "dp2 zero3", "dp2 fp16"], ("data",)),
    **dict.fromkeys(["tp2", "tp2 fp16"], ("tp",)),
    **dict.fromkeys(["pp2 1f1b:2", "pp2 1f1b:2 fp16", "pp2 2bw:2"], ("pp",)),
    "dp2 tp2": ("data", "tp"),
    "tp2 pp2 1f1b:2 fp16": ("tp", "pp"),
}


def said_of(plan: str, said: str) -> str:
    """The message with the coordinates of the last rank and of the first."""
    return said.format(*(", ".join(f"{axis} rank {k}" for axis in AXES[plan]) for k in (1, 0)))


HYBRID = "dp_replicate2 dp_shard2 zero3"
#: Options are compared in each step, before the update; replicated weights, masters and states of
#: the optimizer in a step of `check_every`, at no byte.
CHANGES = [
    *((plan, "lr", CHANGED, said_of(plan, LR)) for plan in AXES),
    *((plan, "betas", CHANGED, said_of(plan, BETAS)) for plan in AXES),
    *((plan, "weights", 4, "weight on data rank 1,") for plan in ("dp2", "dp2 offload:param")),
    *((p, "weights", 4, "weight on data rank 3,") for p in (HYBRID, f"{HYBRID} offload:param")),
    ("dp2 pp2 1f1b:2", "weights", 4, "weight on data rank 1, pp rank 1, whose norm is"),
    ("dp2 bf16", "master", 4, "the fp32 master of 0.weight on data rank 1, whose norm is"),
    ("dp2", "states", 4, "on data rank 1"),
    ("dp3 bf16", "states", 4, "on data rank 2"),
    (HYBRID, "states", 4, "on data rank 3"),
    ("dp2 pp2 1f1b:2", "states", 4, "on data rank 1, pp rank 1"),
]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("plan", "what", "step", "said"), CHANGES)
def test_engines_compare_what_ranks_replicate(plan: str, what: str, step: int, said: str):
    """What differs, the rank and the values are named on all ranks; nothing before it differs."""
    for text in run_threads(ranks_of(plan), in_engine, plan, what):
        assert text.startswith(f"step {step}: ") and said in text
        assert what != "states" or "exp_avg_sq of " in text


def in_loop(world: World, how: str, what: str) -> str:
    """When a plain loop raises what."""
    size = 2 if "HYBRID" in how else None
    wrappers: dict[str, Any] = {"DDP": sw.DDP, "Pipe": partial(sw.Pipe, chunks=2)}
    fsdp = partial(sw.FSDP, sharding_strategy=how, shard_size=size)
    wrapped = wrappers.get(how, fsdp)(model(), world=world)
    optim = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(8):
        if step == CHANGED:
            change(world, what, wrapped, optim.param_groups[0], optim)
        odd = world.rank * (step >= CHANGED)
        own = odd * (what == "batch") if how == "Pipe" else world.rank
        try:
            (loss(wrapped, rows(step, own)) * (1 + odd * (what == "loss"))).backward()
        except InputError as error:
            return f"step {step}: {error}"
        if what == "clip" and step >= CHANGED:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)
        if what != "step" or world.rank == 0 or step != CHANGED:
            optim.step()
        optim.zero_grad()
    return ""


@pytest.fixture(params=["ready", "late"])
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether sums are on the host when they have been begun, or later, as on a GPU."""
    monkeypatch.setattr(same_on_ranks, "EVERY", 4)
    monkeypatch.setattr(HostNumbers, "ready", request.param == "ready")
    return request.param


_DATA = "DDP", "FULL_SHARD", "HYBRID_SHARD"
RATE = "lr of group 0 of the AdamW on data rank {}: 0.5; on data rank 0: 0.01"
LOOPS = [
    *((how, "", "") for how in ("DDP", "FULL_SHARD", "HYBRID_SHARD", "Pipe")),
    *((how, "lr", RATE) for how in _DATA),
    ("Pipe", "lr", "lr of group 0 of the AdamW on pp rank {}: 0.5; on pp rank 0: 0.01"),
    ("Pipe", "batch", "a batch on rank {} of the pp axis that differs from that on rank 0"),
    ("Pipe", "clip", "gradients that each rank scaled by another factor"),
    ("Pipe", "loss", "a gradient of the output of a pipe that differs between ranks"),
    *((how, "step", "since the last backward pass on data rank 1: 'none'; on") for how in _DATA),
    *((how, "weights", "weight on data rank {}, whose norm is") for how in ("DDP", "HYBRID_SHARD")),
    ("FULL_SHARD", "weights", ""),  # each rank may change its own shard
]


@pytest.mark.cases(6)
@pytest.mark.parametrize(("how", "what", "said"), LOOPS)
def test_plain_loops_compare_them_too(how: str, what: str, said: str, numbers: str):
    """Options of an optimizer with the next backward pass; where a GPU computes, one later. The
    stages of a pipe sum numbers in the second call of each EVERY.
    """
    ranks = 4 if "HYBRID" in how else 2
    step = CHANGED + 1 + (how == "Pipe") + (numbers == "late")
    for text in run_threads(ranks, in_loop, how, what):
        assert said.format(ranks - 1) in text
        assert text.startswith(f"step {step}: ") if said else not text


def scaled(world: World, scaler: type[torch.amp.GradScaler]) -> list[float]:
    """The steps after which the optimizer has updated; one rank's gradients overflow in the third.
    -1 for a step that raises, and names the scaler that skips on all ranks.
    """
    wrapped, scale = sw.FSDP(model(), world=world), scaler("cpu")
    optim = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    taken: list[float] = []
    for step in range(5):
        try:
            scale.scale(loss(wrapped, rows(step, world.rank))).backward()
        except InputError as error:
            return [*taken, -1 if "ShardedGradScaler" in str(error) else 0]
        if step == 2 and world.rank == 0:
            optim.param_groups[0]["params"][0].grad.fill_(float("inf"))
        scale.step(optim)
        scale.update()
        optim.zero_grad()
        taken.append(float(optim.state[optim.param_groups[0]["params"][0]]["step"]))
    return taken


def test_a_gradient_scaler_skips_on_all_ranks_or_raises():
    """Torch's scaler for shards shares what overflows; the plain one is named where it did not."""
    assert run_gloo(2, scaled, ShardedGradScaler) == [[1, 2, 2, 3, 4]] * 2
    assert run_gloo(2, scaled, torch.amp.GradScaler) == [[1, 2, 2, -1], [1, 2, 3, -1]]


def of_a_loop(world: World, odd: bool, what: str) -> None:
    """A loop in which the odd rank does something else in the step `CHANGED`."""
    wrapped = [wrap(model(), world=world) for wrap in [sw.DDP if what == "norm" else sw.FSDP] * 2]
    loop = wrapped[odd and what == "order"]
    params = list(loop.parameters())
    halves = [params[:1], params[1:]] if odd and what == "groups" else [params[:2], params[2:]]
    kind = torch.optim.Adam if odd and what == "class" else torch.optim.AdamW
    optim = kind([{"params": half} for half in halves], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", 2.0 ** (8 + odd), enabled=what == "scaler")
    for step in range(CHANGED + 3):
        now = odd and step == CHANGED
        with torch.autocast("cpu", torch.bfloat16, enabled=now and what == "autocast"):
            found = loss(loop, rows(step, world.rank))
        scaler.scale(found).backward()
        if what == "clipped":
            torch.nn.utils.clip_grad_value_(params, 1e-4 * (1 + now))
        if what == "norm":
            sw.clip_grad_norm(loop, 0.1 + now)
        if now and what == "states":
            optim.state[params[1]]["step"].zero_()
        if now and what == "dropped":
            params[1].grad = None
        scaler.step(optim)
        if now and what == "steps":
            optim.step()
        for p in params[: -1 if now and what == "zero_grad" else None]:
            p.grad = None
        if now and what == "frozen":
            loop.get_submodule("1").requires_grad_(False)


def of_an_engine(world: World, odd: bool, what: str) -> None:
    """An engine whose odd rank does something else in the step `CHANGED`, and then saves."""
    plan = "tp2" if what.startswith(("batch", "frozen", "loss", "gradient")) else "dp2"
    table = {"0": "colwise", "1": "rowwise"} if plan == "tp2" else None
    engine = sw.parallelize(model(), plan, world, loss=loss, table=table, check_every=4)
    for step in range(CHANGED + 2):
        now = odd and step == CHANGED
        if odd and what == f"frozen before step {step}":
            engine.model.get_parameter("0.weight" if now else "1.bias").requires_grad_(False)
        if now and what == "mode":
            engine.model.eval()
        if now and what == "loss":
            engine.loss = lambda m, x: 1.5 * loss(m, x)
        if now and what == "gradient":
            engine.model.get_parameter("1.bias").register_hook(triple)
        if now and what == "states":
            engine.optimizer.state.clear()
        if now and what == "weights":
            engine.model.get_parameter("0.weight").data.mul_(1 + 1e-6)
            engine.model.get_parameter("1.weight").data.mul_(3)
        batch = rows(step, now if "batch" in what else engine.data_rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=now and what == "autocast"):
            engine.step(batch.double() if odd and what == "dtype" else batch)
    engine.evaluate(rows(0, odd))
    sw.full_state_dict(engine)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("run", "what", "said"),
    [
        (of_a_loop, "order", "the place of this module in the order of wrapping on data rank 1: 2"),
        (of_a_loop, "clipped", "gradients that each rank clipped at another value"),
        (of_a_loop, "groups", "parameters of group 0 of the AdamW on data rank 1: ['0.weight']"),
        (of_a_loop, "class", "steps since the last backward pass on data rank 1: {'Adam'"),
        (of_a_loop, "steps", "steps since the last backward pass on data rank 1: {'AdamW"),
        (of_a_loop, "norm", "max_norm of sw.clip_grad_norm on data rank 1: 1.1"),
        (of_a_loop, "zero_grad", "gradients kept from the step before on data rank 1: True"),
        (of_a_loop, "frozen", "requires_grad of 1.bias on data rank 1: False"),
        (of_a_loop, "autocast", "torch.autocast in the forward pass on data rank 1: 'torch.bfloat"),
        (of_a_loop, "scaler", "the scale of the gradient scaler on data rank 1: 512.0"),
        (of_a_loop, "dropped", "set to None before a step of the optimizer on data rank 1: ['0.bi"),
        (of_a_loop, "states", "changes of the states of the AdamW on data rank 1: True"),
        (of_an_engine, "gradient", "the gradient of 1.bias"),
        (of_an_engine, "autocast", "torch.autocast in the forward pass on data rank 1: 'torch.bf"),
        (of_an_engine, "dtype", "of another dtype on other data ranks"),
        (of_an_engine, "states", "missing states of engine.optimizer on data rank 1: True"),
        (of_an_engine, "mode", "training of 0 on data rank 1: False"),
        (of_an_engine, "weights", "1.weight on data rank 1, whose norm"),
        (of_an_engine, "batch", "a batch on rank 1 of the tp axis"),
        (of_an_engine, "loss", "a loss that differs"),
        (of_an_engine, "frozen before step 1", "no gradient of 1.bias on rank 1 of the tp axis"),
        (of_an_engine, "frozen before step 3", "requires_grad of 0.weight on tp rank 1: False; on"),
        (of_an_engine, "batch of the evaluation", "a batch on rank 1 of the tp axis"),
    ],
)
def test_ranks_that_do_something_else_are_told(run: Any, what: str, said: str):
    """In the step itself or where the ranks meet next, on all of them."""
    on_ranks = run_gloo if what == "order" else run_threads  # whose messages could be exchanged
    for text in on_ranks(2, told, run, what):
        assert said in text


def told(world: World, run: Any, what: str) -> str:
    return refusal(lambda: run(world, world.rank == 1, what))


def triple(*args: Any) -> Any:
    return 3 * args[-1]


Change = Callable[[pytest.MonkeyPatch, Any], object]
#: What rank 1 alone does with a module that is wrapped.
ALONE: dict[str, Change] = {
    "weights": lambda _, model: [p.data.mul_(1 + 1e-6) for p in model.parameters()],
    "list": lambda patch, model: patch.setitem(model.factors, "out", 2.0),
    "variable": lambda patch, _: patch.setenv("FACTOR", "2"),
    "function": lambda patch, _: patch.setattr(nn.functional, "linear", triple),
    "numbers": lambda _, model: vars(model).update(config=SimpleNamespace(gated=True)),
    "hook of 1.weight": lambda _, model: model.get_parameter("1.weight").register_hook(triple),
    "hook of 1": lambda _, model: model.get_submodule("1").register_forward_hook(triple),
}


def step_and_scale(module: nn.Module, world: World, params: int) -> None:
    """A step, after which the program multiplies so many parameters."""
    loss(module, rows(0, world.rank)).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with torch.no_grad():
        for p in [*module.parameters()][:params]:
            p.mul_(1 - 0.1 * world.rank)


def odd_rank_warns(world: World, what: str, said: str) -> None:
    """Rank 1 has other weights, by rounding, a hook of its own, or one more backward pass."""
    patch = pytest.MonkeyPatch()
    wrapped = (sw.FSDP if what == "scaled" else sw.DDP)(model(), world=world)
    if what in ("writes", "scaled"):
        for _ in range(1 + (what == "scaled")):
            step_and_scale(wrapped, world, 4 if what == "scaled" else world.rank)
    elif world.rank and what == "passes":
        with sw.no_sync(wrapped):
            loss(wrapped, rows(0, world.rank)).backward()
    elif world.rank and what in ALONE:
        ALONE[what](patch, wrapped)
    taken = [2.0, "x"] if what == "arguments" and world.rank else []
    value = (wrapped(rows(0, world.rank), *taken) * 3).square().mean()
    with pytest.warns(UserWarning, match=said):
        (value * 2 if what == "loss" and world.rank else value).backward()
    patch.undo()
    loss(wrapped, rows(1, world.rank)).backward()


def odd_tensor_rank_warns(world: World, _: str, said: str) -> None:
    engine = sw.parallelize(
        model(), "tp2", world, loss=loss, table={"0": "colwise", "1": "rowwise"}
    )
    if world.rank:
        engine.model.get_submodule("1").register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=said):
        engine.step(rows(0, 0))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weights", r"on data rank 1 differ .* by rounding"),
        ("writes", "changes of parameters since the step before on data rank 1: 5; on"),
        ("scaled", "weights that each rank scaled by another factor after an optimizer step"),
        ("list", r"factors\['out'\] of the model on data rank 1: 2.0; on data rank 0: 1.0"),
        ("variable", "the environment's FACTOR in the forward of Scaled on data rank 1: '2'; on"),
        ("function", r"F.linear in the forward of Linear on data rank 1: 'triple \(code"),
        ("passes", "the backward passes of the step on data rank 1: 2; on data rank 0: 1"),
        ("numbers", "config.gated of the model on data rank 1: True; on data rank 0: 'none'"),
        (
            "arguments",
            r"words that forward passes take on data rank 1: \[2.0, 'x'\]; on data rank 0: \[\]",
        ),
        ("hook of 1.weight", r"hooks of 1.weight on data rank 1: \['backward_hook triple"),
        ("hook of 1", r"hooks of 1 on data rank 1: .* on data rank 0: 'none'"),
        ("loss", r"the last operations of the loss on data rank 1: \['MulBackward0 of MeanBack"),
        ("hook", r"hooks of 1 on tp rank 1: .* on tp rank 0: 'none'"),
    ],
)
def test_what_may_be_no_mistake_of_a_program_is_a_warning(what: str, said: str):
    """Hosts with other processors round otherwise; a logger has hooks on rank 0 alone."""
    run_gloo(2, odd_tensor_rank_warns if "tp" in said else odd_rank_warns, what, said)


class Skips(nn.Module):
    """Blocks that are alike, one of which is left out, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        skipped = int(x[0, 0])
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x).tanh()
        return x


def skips(world: World, plan: str) -> str:
    """What ranks that leave out different blocks are told."""
    engine = build(world, rows_task(lambda: settled(Skips())), Case(f"{plan} fp64"))
    x, y = vectors(0)
    x[0, 0] = 1 + world.rank
    try:
        engine.step((x, y))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["dp2 zero3", pytest.param("dp2 zero2", marks=pytest.mark.full)])
def test_ranks_that_gather_other_units_are_told(plan: str):
    """Blocks are alike, and one's weights in another's place are no error of shapes."""
    for said in run_gloo(2, skips, plan):
        assert ("in the units that they gathered" in said) == ("zero3" in plan)


def goes_on(world: World) -> str:
    """What ranks are told of which one has caught an error of its own, and gone on."""
    engine = build(world, rows_task(lambda: settled(nn.Linear(6, 6))), Case("dp2 fp64"))
    for step in range(4):
        x, y = share(vectors(step), engine.data_rank, engine.data_ranks)
        try:
            engine.step((x[:, :3] if world.rank and step == 1 else x, y))
        except RuntimeError:
            continue
        except InputError as error:
            return str(error)
    return ""


def test_a_rank_that_goes_on_after_an_error_of_its_own_is_told():
    """It is a step ahead of the others from then on, and their gradients are of other batches."""
    for said in run_gloo(2, goes_on):
        assert "in the number of steps so far" in said
