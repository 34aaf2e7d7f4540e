"""What all data ranks must have alike: options of the optimizer, and replicated weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import shardwise as sw
from shardwise.comm.tiers.host_numbers import HostNumbers
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.techniques.data import same_on_ranks
from shardwise.techniques.data.checksum import WEIGHTS, bits_sum
from tests.engine.cases import ranks_of, refusal
from tests.engine.cases import squares as loss
from tests.engine.tensors import sent
from tests.pool import run_gloo, run_threads

CHANGED = 3  # the step, counted from 0, before which the last rank changes something


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def change(
    world: World,
    what: str,
    module: nn.Module,
    group: dict[str, Any],
    engine: Engine | None = None,
) -> None:
    """On the last rank: an option of a group, weights or masters."""
    if world.rank < world.size - 1:
        return
    group |= {"lr": {"lr": 0.5}, "betas": {"betas": (0.5, 0.9)}}.get(what, {})
    if what == "master":
        assert engine is not None
        next(iter(engine.optimizer.masters.values())).add_(1e-3)
    if what == "states":
        assert engine is not None
        flip_a_bit(engine)
    if what == "weights":
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)


def flip_a_bit(engine: Engine) -> None:
    """The lowest bit of one number of the last second moment on this rank."""
    moments = [state["exp_avg_sq"] for state in engine.optimizer.state.values()]
    moments[-1].view(-1).view(torch.int32)[-1] ^= 1 << 20


def in_engine(world: World, plan: str, what: str) -> str:
    """When an engine raises what; the bytes of the steps before are those predicted."""
    table = {"0": "colwise", "1": "rowwise"} if "tp" in plan else None
    theory = Predictor(
        model(), plan, EngineOptions(loss=loss, check_every=2, table=table), rank=world.rank
    )
    options: dict[str, Any] = {"optimizer": sw.AdamW(lr=0.01), "loss": loss, "check_every": 2}
    options |= {"table": table}
    engine = sw.parallelize(model(), plan, world, **options)
    for step in range(6):
        if step == CHANGED:
            change(world, what, engine.model, engine.optimizer.param_groups[0], engine)
        batch = rows(step, engine.data_rank)
        try:
            engine.step(batch)
        except InputError as error:
            return f"step {step}: {error}"
        assert sent(engine) == theory.of(batch).in_step(step)
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


@pytest.mark.parametrize("plan", AXES)
@pytest.mark.parametrize(("what", "said"), [("lr", LR), ("betas", BETAS)])
def test_engines_compare_options_in_each_step(plan: str, what: str, said: str):
    """Option, rank and both values are named on all ranks, before the update."""
    said = said.format(*(", ".join(f"{axis} rank {k}" for axis in AXES[plan]) for k in (1, 0)))
    for text in run_threads(ranks_of(plan), in_engine, plan, what):
        assert text.startswith(f"step {CHANGED}: ") and said in text


@pytest.mark.parametrize("plan", ["dp2 pp2 1f1b:2", "dp2 zero2 accumulate:2", "dp2 pp2 2bw:2"])
def test_ranks_that_agree_train_on(plan: str):
    """Nothing is raised, and the bytes are those of any step."""
    assert run_threads(ranks_of(plan), in_engine, plan, "") == [""] * ranks_of(plan)


HYBRID = "dp_replicate2 dp_shard2 zero3"
REPLICATED = {
    **dict.fromkeys(["dp2", "dp2 offload:param"], "weight on data rank 1"),
    **dict.fromkeys([HYBRID, f"{HYBRID} offload:param"], "weight on data rank 3"),
    "dp2 pp2 1f1b:2": "weight on data rank 1, pp rank 1",
    "dp2 bf16": "the fp32 master of 0.weight on data rank 1",
}


@pytest.mark.parametrize("plan", REPLICATED)
def test_engines_compare_the_weights_that_ranks_replicate(plan: str):
    """In a step of `check_every`, at no byte; the parameter and the ranks are named."""
    what = "master" if "bf16" in plan else "weights"
    for text in run_threads(ranks_of(plan), in_engine, plan, what):
        assert text.startswith("step 4: ") and f"{REPLICATED[plan]}, whose norm is" in text


DAMAGED = {
    "dp2": "on data rank 1",
    "dp3 bf16": "on data rank 2",
    HYBRID: "on data rank 3",
    "dp2 pp2 1f1b:2": "on data rank 1, pp rank 1",
}


@pytest.mark.parametrize("plan", DAMAGED)
def test_a_bit_that_flips_in_a_state_of_the_optimizer_is_found(plan: str):
    """The state, its parameter and the rank are named on all ranks."""
    for text in run_threads(ranks_of(plan), in_engine, plan, "states"):
        assert text.startswith("step 4: ") and "exp_avg_sq of " in text and DAMAGED[plan] in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts(dtype: torch.dtype):
    """Whichever bit of whichever element turns over, the number that ranks compare changes."""
    hashes = sw.parallelize(model(), "fp32", alone(), loss=loss).consensus.same.hashes
    x = torch.randn(2 * WEIGHTS + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    before = bits_sum(x).remainder(hashes)
    for index in (0, 1, 2, 3, WEIGHTS - 1, WEIGHTS, 2 * WEIGHTS + 2):
        for bit in range(8 * x.element_size()):
            other = x.clone()
            other.view(whole)[index] ^= torch.ones((), dtype=whole) << bit
            assert bits_sum(other).remainder(hashes) != before, f"bit {bit} of element {index}"


def in_loop(world: World, how: str, what: str) -> str:
    """When a plain loop raises what."""
    size = 2 if "HYBRID" in how else None
    wrapped = sw.DDP(model(), world) if how == "DDP" else None
    wrapped = wrapped or sw.FSDP(model(), how, world=world, shard_size=size)
    optim = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(8):
        if step == CHANGED:
            change(world, what, wrapped, optim.param_groups[0])
        try:
            loss(wrapped, rows(step, world.rank)).backward()
        except InputError as error:
            return f"step {step}: {error}"
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


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("", ""),
        ("lr", "lr of group 0 of the AdamW on data rank {}: 0.5; on data rank 0: 0.01"),
        ("step", "the optimizer steps since the last backward pass on data rank 1: 'none'; on"),
        ("weights", "weight on data rank {}, whose norm is"),
    ],
)
def test_plain_loops_compare_them_too(how: str, what: str, said: str, numbers: str):
    """Options of an optimizer with the next backward pass; where a GPU computes, one later."""
    ranks = 4 if "HYBRID" in how else 2
    found = run_threads(ranks, in_loop, how, what)
    if what == "weights" and how == "FULL_SHARD":  # each rank may change its own shard
        said = ""
    step = CHANGED + 1 + (numbers == "late")
    for text in found:
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


def in_pipe(world: World, what: str) -> str:
    """When a loop over the stages of a pipe raises what."""
    piped = sw.Pipe(model(), chunks=2, world=world)
    optim = torch.optim.AdamW(piped.parameters(), lr=0.01)
    for step in range(8):
        if step == CHANGED:
            change(world, what, piped, optim.param_groups[0])
        try:
            loss(piped, rows(step, 0)).backward()
        except InputError as error:
            return f"step {step}: {error}"
        optim.step()
        optim.zero_grad()
    return ""


@pytest.mark.parametrize("what", ["", "lr"])
def test_loops_over_a_pipe_compare_options_now_and_then(what: str, numbers: str):
    """The stages sum a number in the second call of each EVERY; a GPU reads it in the next."""
    said = "lr of group 0 of the AdamW on pp rank 1: 0.5; on pp rank 0: 0.01" if what else ""
    for text in run_threads(2, in_pipe, what):
        assert said in text
        assert text.startswith(f"step {5 + (numbers == 'late')}: ") if what else not text


def of_a_loop(world: World, odd: bool, what: str) -> None:
    """A loop in which the odd rank does something else in the step `CHANGED`."""
    wrapped = [wrap(model(), world=world) for wrap in [sw.DDP if what == "norm" else sw.FSDP] * 2]
    loop = wrapped[odd and what == "order"]
    params = list(loop.parameters())
    halves = [params[:1], params[1:]] if odd and what == "groups" else [params[:2], params[2:]]
    kind = torch.optim.Adam if odd and what == "class" else torch.optim.AdamW
    optim = kind([{"params": half} for half in halves], lr=0.01)
    for step in range(CHANGED + 3):
        now = odd and step == CHANGED
        loss(loop, rows(step, world.rank)).backward()
        if what == "norm":
            sw.clip_grad_norm(loop, 0.1 + now)
        optim.step()
        if now and what == "steps":
            optim.step()
        if not (now and what == "zero_grad"):
            optim.zero_grad()
        if now and what == "frozen":
            loop.get_submodule("1").requires_grad_(False)


def of_an_engine(world: World, odd: bool, what: str) -> None:
    """An engine whose odd rank does something else in the step `CHANGED`, and then saves."""
    plan = "tp2" if "batch" in what else "dp2"
    table = {"0": "colwise", "1": "rowwise"} if plan == "tp2" else None
    engine = sw.parallelize(model(), plan, world, loss=loss, table=table)
    for step in range(CHANGED + 2):
        now = odd and step == CHANGED
        if now and what == "mode":
            engine.model.eval()
        if now and what == "weights":
            with torch.no_grad():
                engine.model.get_parameter("0.weight").mul_(1 + 1e-6)
                engine.model.get_parameter("1.weight").mul_(3)
        engine.step(rows(step, now if "batch" in what else world.rank))
    engine.evaluate(rows(0, odd))
    sw.full_state_dict(engine)


@pytest.mark.parametrize(
    ("run", "what", "said"),
    [
        (of_a_loop, "order", "the place of this module in the order of wrapping on data rank 1: 2"),
        (of_a_loop, "groups", "parameters of group 0 of the AdamW on data rank 1: ['0.weight']"),
        (
            of_a_loop,
            "class",
            "optimizer steps since the last backward pass on data rank 1: {'Adam'",
        ),
        (
            of_a_loop,
            "steps",
            "optimizer steps since the last backward pass on data rank 1: {'AdamW",
        ),
        (of_a_loop, "norm", "max_norm of sw.clip_grad_norm on data rank 1: 1.1"),
        (of_a_loop, "zero_grad", "gradients kept from the step before on data rank 1: True"),
        (of_a_loop, "frozen", "requires_grad of 1.bias on data rank 1: False"),
        (of_an_engine, "mode", "training of 0 on data rank 1: False"),
        (of_an_engine, "weights", "1.weight on data rank 1, whose norm"),
        (of_an_engine, "batch", "a batch on rank 1 of the tp axis"),
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


def rounded(world: World, factor: float) -> str:
    """What is said where weights of rank 1 are multiplied by a factor."""
    wrapped = sw.DDP(model(), world)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.mul_(factor**world.rank)
    with pytest.warns(UserWarning, match=r"on data rank 1 differ .* by rounding"):
        loss(wrapped, rows(0, world.rank)).backward()
    return ""


def test_weights_that_differ_by_rounding_are_a_warning():
    """Hosts with other processors round otherwise; that is no mistake of a program."""
    run_gloo(2, rounded, 1 + 1e-6)
