"""What a program may not do with a model that is wrapped or in an engine, each with a remedy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.engine.cases import difference, refusal, settled, squares
from tests.engine.loops import rows, steps, wrap
from tests.engine.test_programs import by_weight, coder, penalised
from tests.engine.test_wrapped import apply_in_backward
from tests.engine.zoo import make
from tests.pool import run_threads

# --- what is refused ------------------------------------------------------------------------------

Act = Callable[[Any], object]


def engine_of(world: World, plan: str, loss: Any = by_weight, **options: Any) -> sw.Engine:
    return sw.parallelize(
        coder(), plan, world, optimizer=sw.SGD(lr=0.1), loss=loss, least_unit_bytes=0, **options
    )


def acting(how: str, act: Act) -> Callable[[World], object]:
    """A loop over a wrapped module, with an act between each backward pass and the update."""

    def loop(world: World) -> None:
        module = wrap(how, make("stack").double(), world)
        for step in steps(torch.optim.SGD(module.parameters(), lr=0.1)):
            squares(module, rows(step, world.rank * (how != "Pipe"))).backward()
            act(module)
        module(rows(4, world.rank)).sum().backward()

    return loop


def by_torch(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def drop_later(module: nn.Module) -> None:
    """As an optimizer in a hook does, which would update this rank's copy by its own gradient."""
    p = next(module.parameters())
    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def twice(module: nn.Module) -> None:
    try:
        squares(module, rows(0, 0)).backward(create_graph=True)
    finally:
        squares(module, rows(0, 0)).backward()  # the next pass is as any other


def gradient_of_gradient(module: nn.Module) -> None:
    torch.autograd.grad(squares(module, rows(0, 0)), [*module.parameters()], create_graph=True)


def early(module: nn.Module) -> Tensor:
    """A term over parameters before the forward pass."""
    return sum(p.square().sum() for p in module.parameters()) + squares(module, rows(0, 0))


def line_search(module: nn.Module) -> None:
    torch.optim.LBFGS(module.parameters()).step(lambda: torch.zeros(()))


def assign(change: Callable[[Tensor], Tensor]) -> Act:
    def act(module: nn.Module) -> None:
        p = next(module.parameters())
        p.data, p.grad = change(p.data), None

    return act


def assign_in_engine(world: World) -> None:
    made = engine_of(world, "zero2 offload:optim")
    for step in range(2):
        made.step(rows(step, 0))
        assign(torch.zeros_like)(made.model)


def in_backward(world: World, how: str) -> None:
    model = make("sequential").double()
    apply_in_backward(torch.optim.SGD, model, lr=0.1)
    if how == "engine":
        sw.parallelize(model, "dp2 fp64", world, loss=squares)
    wrap(how, model, world)(rows(0, world.rank)).sum().backward()


def mapped(model: Any, x: Tensor) -> Tensor:
    return torch.vmap(model)(x).square().mean()


DROPPED = "drops the gradient of ... optim.step() in the loop"
TWICE = "create_graph=True ... sw.DDP(module)"
SEVEN = "blocks.0.up.weight.data = a tensor [7]"
PART = "of blocks.0.up, a part of a sharded module"
TABLE = {"leave": "colwise_gather_output"}
REFUSED: list[tuple[Callable[[World], object], str]] = [
    (acting("FULL_SHARD", by_torch), "nn.utils.clip_grad_norm_ ... sw.clip_grad_norm(module"),
    *((acting(how, drop_later), DROPPED) for how in ("DDP", "FULL_SHARD")),
    *((acting("FULL_SHARD", act), TWICE) for act in (twice, gradient_of_gradient)),
    (acting("SHARD_GRAD_OP", twice), TWICE),
    (acting("Pipe", line_search), "a step of LBFGS under sw.Pipe ... LBFGS with sw.DDP(module)"),
    (acting("FULL_SHARD", early), "computed before a forward pass ... out = model(x) first"),
    *((acting(how, assign(lambda x: x.new_zeros(7))), SEVEN) for how in ("DDP", "FULL_SHARD")),
    (acting("SHARD_GRAD_OP", assign(Tensor.half)), "torch.float16"),
    (assign_in_engine, "masters on another tier"),
    (acting("FULL_SHARD", lambda m: m.blocks[0].up.state_dict()), PART),
    (acting("FULL_SHARD", lambda m: m.blocks[0].up.load_state_dict(m.state_dict())), PART),
    *(
        (partial(in_backward, how=how), "applied in the backward pass ... optim.step()")
        for how in ("FULL_SHARD", "Pipe", "engine")
    ),
    (
        lambda world: engine_of(world, "zero3", penalised).step(rows(0, 0)),
        "create_graph=True ... the plan word ddp",
    ),
    *(
        (
            lambda world, plan=plan: engine_of(world, plan, mapped).step(rows(0, 0)),
            "torch.func (vmap ... the plain module, and torch.distributed",
        )
        for plan in ("dp2 zero3", "pp2 1f1b:2")
    ),
    (
        lambda world: engine_of(world, "tp2 fp64", table=TABLE).step(rows(0, 0)),
        "leave.weight, of which each tensor rank holds a part",
    ),
]


@pytest.mark.cases(100)
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_a_wrapped_module_refuses(call: Callable[[World], object], said: str):
    """In one paragraph on every rank, before a wrong weight is used."""
    for text in run_threads(2, lambda world: refusal(partial(call, world))):
        assert all(phrase in text for phrase in said.split(" ... ")), text


def clip_values(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)


def clip_by_ours(module: nn.Module) -> None:
    sw.clip_grad_norm(module, 0.1)


def unscale(module: nn.Module, parameters: int | None = None) -> None:
    for p in list(module.parameters())[:parameters]:
        p.grad = p.grad if p.grad is None else p.grad.mul_(0.125)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("how", "act"),
    [
        *(("FULL_SHARD", act) for act in (clip_by_ours, clip_values, unscale)),
        *(("FULL_SHARD", partial(unscale, parameters=1)), ("DDP", by_torch)),
    ],
)
def test_what_scales_all_ranks_alike_is_not(how: str, act: Act):
    """Nor what changes elements one by one, nor a part of the parameters."""
    run_threads(2, acting(how, act))


# --- models that change ---------------------------------------------------------------------------


def net() -> Any:
    return make("middle frozen").double()


def adapter(model: Any) -> None:
    model.blocks.append(settled(nn.Linear(6, 6)).double())


def new_head(model: Any) -> None:
    model.blocks[2] = settled(nn.Linear(6, 3)).double()


def new_weight(model: Any) -> None:
    model.blocks[2].down.weight = nn.Parameter(torch.ones(6, 9, dtype=torch.float64))


def tie(model: Any) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def unfreeze(model: Any) -> None:
    model.blocks[1].requires_grad_(True)


CHANGES: dict[Act, str] = {
    adapter: r"blocks\.3 \(new\)",
    new_head: r"blocks\.2 \(replaced\)",
    new_weight: r"blocks\.2\.down\.weight \(replaced\)",
    tie: r"blocks\.2\.up\.weight \(replaced\)",
    unfreeze: r"unfrozen .*blocks\.1\.up\.weight",
}
CHANGED = [(how, change) for how in ("FULL_SHARD", "DDP") for change in CHANGES]


def train(model: Any, shares: list[int], first: int) -> None:
    optim = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in steps(optim, 2):
        for rank in shares:
            (squares(model, rows(first + step, rank)) / len(shares)).backward()


def wrapped_again(world: World, how: str, change: Act) -> dict[str, Tensor]:
    model: Any = wrap(how, net(), world)
    train(model, [world.rank], 0)
    plain = sw.unwrap(model)
    change(plain)
    model = wrap(how, plain, world)
    train(model, [world.rank], 2)
    return sw.full_state_dict(model)


@pytest.mark.cases(3)
@pytest.mark.parametrize(("how", "change"), CHANGED)
def test_a_model_that_is_changed_and_wrapped_again_trains_as_in_one_process(how: str, change: Act):
    """The documented way: unwrapped, changed and wrapped again."""
    plain = net()
    train(plain, [0, 1], 0)
    change(plain)
    train(plain, [0, 1], 2)
    state = run_threads(2, wrapped_again, how, change)[0]
    for name, value in plain.state_dict().items():
        assert difference(state[name], value) <= 1e-10, name


def changed(world: World, how: str, change: Act, folder: Path) -> None:
    """A change of a model that is wrapped, or that an engine has."""
    made: Any
    if " " in how:
        made = sw.parallelize(net(), how, world, loss=squares, least_unit_bytes=0)
        made.step(rows(0, 0))
        model, said = made.model, "a new engine"
        calls = [partial(made.step, rows(0, 0)), partial(made.evaluate, rows(0, 0))]
        calls += [partial(sw.save, made, folder)]
    else:
        made = model = wrap(how, net(), world)
        train(model, [world.rank * (how != "Pipe")], 0)
        calls, said = [partial(model, rows(0, 0))], "sw.unwrap"
        if how == "Pipe":
            calls, said = [*calls, partial(sw.unwrap, model)], ""
    change(model)
    for act in [*calls, partial(sw.full_state_dict, made)]:
        with pytest.raises(InputError, match=f"{CHANGES[change]}.*{said}"):
            act()


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("how", "change"),
    [
        *(("zero3 fp64", new_weight), ("ddp fp64", unfreeze), ("pp2 1f1b:1 fp64", adapter)),
        *(("Pipe", new_head), ("Pipe", adapter)),
        *CHANGED,
    ],
)
def test_a_change_is_refused_on_every_rank(how: str, change: Act, tmp_path: Path):
    """In each call, in the same words, also where the changed layer is another rank's."""
    run_threads(2, changed, how, change, tmp_path)


def test_parameters_lent_for_an_evaluation_are_no_change():
    """torch.func.functional_call of averaged weights, with and without a gradient, under DDP."""
    plain, model = net(), sw.DDP(net(), alone())
    lent = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    with torch.no_grad():
        found = functional_call(model, lent, (rows(0, 0),))
        assert difference(found, functional_call(plain, lent, (rows(0, 0),))) == 0
    functional_call(model, lent, (rows(0, 0),))
    model(rows(0, 0)).sum().backward()


WRITES: dict[str, Callable[[Any], object]] = {
    "by name": lambda m: [x.weight.data.mul_(0.9) for x in m.modules() if hasattr(x, "bias")],
    "by a state": lambda m: m.load_state_dict({n: x / 9 for n, x in m.state_dict().items()}),
    "by a plain state": lambda m: m.load_state_dict(make("stack").double().state_dict()),
    "assigned": lambda m: [setattr(p, "data", p.detach() * 0.9) for p in m.parameters()],
    "in a loop": lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "frozen": lambda m: [p.requires_grad_(not p.requires_grad) for p in m.blocks[0].parameters()],
    "kept": lambda m: [
        p.detach().mul_(0.9) for x in m.modules() for p in dict.values(x._parameters)
    ],
}


def writing(world: World, plan: str, how: str) -> dict[str, Tensor]:
    """The state after three steps, each followed by a write."""
    model, batch = make("stack").double(), rows(0, world.rank % 2)
    if plan:
        engine = sw.parallelize(model, plan, world, optimizer=sw.SGD(lr=0.1), loss=squares)
    else:
        model = sw.FSDP(model, world=world)
    for _ in range(3):
        if plan:
            engine.step(batch)
        else:
            squares(model, batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        WRITES[how](engine.model if plan else model)
    return sw.full_state_dict(engine if plan else model)


ROWS = "zero1 fp64", "zero2 offload:optim fp64", "zero3 fp64", "bf16", "zero1 bf16", "zero3 bf16"
WRITTEN = ["", "zero3 offload:param fp64", *ROWS, *(f"pp2 {row} 1f1b:2" for row in ROWS[::2])]


@pytest.mark.parametrize(  # masters on another tier take none that is assigned
    ("plan", "how"),
    [(p, how) for p in WRITTEN for how in WRITES if (p, how) != (ROWS[1], "assigned")],
)
def test_a_write_between_steps_is_kept(plan: str, how: str):
    """Also while the update's gather is under way, of a piece, and by masters of 32 bits."""
    expected, _ = run_threads(2, writing, "ddp fp64", how)
    found = run_threads(4 if "pp2" in plan else 2, writing, plan, how)[0]
    worst = max(difference(found[name], value) for name, value in expected.items())
    assert worst < (3e-2 if "bf16" in plan else 1e-12)
