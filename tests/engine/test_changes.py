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


def engine_of(world: World, plan: str, loss: Any = by_weight, **options: Any) -> sw.Engine:
    return sw.parallelize(
        coder(), plan, world, optimizer=sw.SGD(lr=0.1), loss=loss, least_unit_bytes=0, **options
    )


def scaled(world: World, how: str, act: Callable[[nn.Module], object]) -> None:
    module = wrap(how, make("stack").double(), world)
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in steps(optim):
        module(rows(step, world.rank)).square().sum().backward()
        act(module)
    module(rows(4, world.rank)).sum().backward()


def by_torch(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def dropping(world: World, how: str) -> None:
    """As an optimizer in a hook does, which would update this rank's copy by its own gradient."""
    model = wrap(how, make("stack").double(), world)
    p = next(model.parameters())
    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(rows(0, 0)).sum().backward()


def differentiating(world: World, how: str) -> None:
    """By backward, or by torch.autograd.grad."""
    model = wrap(how, make("sequential").double(), world)
    loss = squares(model, rows(0, world.rank))
    try:
        if how == "FULL_SHARD":
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss.backward(create_graph=True)
    finally:
        squares(model, rows(0, world.rank)).backward()  # the next pass is as any other


def early(world: World, how: str) -> None:
    """A term over parameters before the forward pass."""
    model = wrap(how, make("stack").double(), world)
    term = sum(p.square().sum() for p in model.parameters())
    assert squares(model, rows(0, world.rank)) + term


def in_backward(world: World, how: str) -> None:
    model = make("sequential").double()
    apply_in_backward(torch.optim.SGD, model, lr=0.1)
    if how == "engine":
        sw.parallelize(model, "dp2 fp64", world, loss=squares)
    elif how == "Pipe":
        sw.Pipe(model, chunks=1, world=world)(rows(0, 0)).sum().backward()
    else:
        wrap(how, model, world)(rows(0, world.rank)).sum().backward()


def line_search(world: World) -> None:
    module = sw.Pipe(make("sequential").double(), chunks=1, world=world)
    module(rows(0, 0)).sum().backward()
    torch.optim.LBFGS(module.parameters()).step(lambda: torch.zeros(()))


def assigning(world: World, how: str, value: Callable[[Tensor], Tensor]) -> None:
    if how.startswith("zero"):
        made = engine_of(world, how)
        made.step(rows(0, 0))
        model, call = made.model, made.step
    else:
        model = call = wrap(how, coder(), world)
    scale = model.get_parameter("scale")
    scale.data = value(scale.data)
    call(rows(1, 0))


def part_of(world: World, *, load: bool) -> None:
    model: Any = wrap("FULL_SHARD", coder(), world)
    state = model.state_dict()
    model.leave.load_state_dict(state) if load else model.leave.state_dict()


def reading(world: World) -> None:
    """Of a weight that tensor ranks hold in parts, dtype and shape can be read."""

    def loss(model: Any, x: Tensor) -> Tensor:
        assert model.leave.weight.dtype == torch.float64
        return by_weight(model, x)

    engine_of(world, "tp2 fp64", loss, table={"leave": "colwise_gather_output"}).step(rows(0, 0))


def transformed(world: World, plan: str) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return torch.vmap(model)(x).square().mean()

    engine_of(world, plan, loss).step(rows(0, 0))


def seven(_: Tensor) -> Tensor:
    return torch.zeros(7, dtype=torch.float64)


CLIPPED = "torch.nn.utils.clip_grad_norm_", "sw.clip_grad_norm(module"
DROPPED = "drops the gradient of", "optim.step() in the loop"
EARLY = "computed before a forward pass", "out = model(x) first"
TWICE = "create_graph=True", "sw.DDP(module)"
MAPPED = "torch.func (vmap", "the plain module, and torch.distributed"
APPLIED = "applied in the backward pass", "optim.step()"
PART = ("of leave, a part of a sharded module",)
REFUSED: list[tuple[str, Callable[[World], object], tuple[str, ...]]] = [
    ("FULL_SHARD", partial(scaled, how="FULL_SHARD", act=by_torch), CLIPPED),
    *((how, partial(dropping, how=how), DROPPED) for how in ("DDP", "FULL_SHARD")),
    *((how, partial(differentiating, how=how), TWICE) for how in ("FULL_SHARD", "SHARD_GRAD_OP")),
    ("Pipe", line_search, ("a step of LBFGS under sw.Pipe", "LBFGS with sw.DDP(module)")),
    ("FULL_SHARD", partial(early, how="FULL_SHARD"), EARLY),
    (
        "zero3",
        lambda world: engine_of(world, "zero3", penalised).step(rows(0, 0)),
        ("create_graph=True", "the plan word ddp"),
    ),
    *((plan, partial(transformed, plan=plan), MAPPED) for plan in ("dp2 zero3", "pp2 1f1b:2")),
    *((how, partial(in_backward, how=how), APPLIED) for how in ("FULL_SHARD", "Pipe", "engine")),
    *(
        (how, partial(assigning, how=how, value=seven), ("scale.data = a tensor [7]",))
        for how in ("DDP", "FULL_SHARD")
    ),
    ("half", partial(assigning, how="SHARD_GRAD_OP", value=Tensor.half), ("torch.float16",)),
    (
        "masters",
        partial(assigning, how="zero2 offload:optim", value=torch.zeros_like),
        ("masters on another tier",),
    ),
    *((f"part {load}", partial(part_of, load=load), PART) for load in (False, True)),
    ("tp2", reading, ("leave.weight, of which each tensor rank holds a part",)),
]


@pytest.mark.cases(100)
@pytest.mark.parametrize(
    ("call", "said"), [pytest.param(*row[1:], id=f"{row[0]} {row[2][0]}") for row in REFUSED]
)
def test_what_a_wrapped_module_refuses(call: Callable[[World], object], said: tuple[str, ...]):
    """In one paragraph on every rank, before a wrong weight is used."""
    for text in run_threads(2, lambda world: refusal(partial(call, world))):
        assert all(phrase in text for phrase in said), text


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
def test_what_scales_all_ranks_alike_is_not(how: str, act: Callable[[nn.Module], object]):
    """Nor what changes elements one by one, nor a part of the parameters."""
    run_threads(2, scaled, how, act)


# --- models that change ---------------------------------------------------------------------------


class Net(nn.Module):
    """A frozen trunk, a trained head, and room for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 6)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(self.enter(x)))
        return self.head(h if self.adapter is None else h + self.adapter(h))


def net() -> Any:
    model = settled(Net()).double()
    model.get_submodule("trunk").requires_grad_(False)
    return model


def layer(out: int = 6) -> nn.Module:
    return settled(nn.Linear(6, out)).double()


def adapter(model: Any) -> None:
    model.adapter = layer()


def new_head(model: Any) -> None:
    model.head = layer(3)


def new_weight(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))


def tie(model: Any) -> None:
    model.head.weight = model.enter.weight


def unfreeze(model: Any) -> None:
    model.trunk.requires_grad_(True)


Change = Callable[[Any], None]
CHANGES: dict[Change, str] = {
    adapter: r"adapter \(new\)",
    new_head: r"head \(replaced\)",
    new_weight: r"head\.weight \(replaced\)",
    tie: r"head\.weight \(replaced\)",
    unfreeze: r"unfrozen .*trunk\.0\.weight",
}


def train(model: Any, shares: list[int], first: int) -> None:
    optim = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in steps(optim, 2):
        for rank in shares:
            (squares(model, rows(first + step, rank)) / len(shares)).backward()


def assert_refused(acts: list[Callable[[], object]], said: str) -> None:
    for act in acts:
        with pytest.raises(InputError, match=said):
            act()


def changed_late(world: World, how: str, change: Change) -> dict[str, Tensor]:
    """Refused by forward and full_state_dict; then unwrapped, changed and wrapped again."""
    model: Any = wrap(how, net(), world)
    train(model, [world.rank], 0)
    before = {m: dict(m._modules) | dict(m._parameters) for m in model.modules()}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    change(model)
    acts = [lambda: model(rows(0, 0)), lambda: sw.full_state_dict(model)]
    assert_refused(acts, f"{CHANGES[change]}.*sw.unwrap")
    for module, parts in before.items():  # as the error says
        for key, part in parts.items():
            if getattr(module, key) is not part:
                setattr(module, key, part)
    model.adapter = None
    for p in frozen:
        p.requires_grad_(False)
    plain = sw.unwrap(model)
    change(plain)
    model = wrap(how, plain, world)
    train(model, [world.rank], 2)
    return sw.full_state_dict(model)


@pytest.mark.cases(3)
@pytest.mark.parametrize("how", ["FULL_SHARD", "DDP"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_wrapping_is_refused_and_the_documented_way_is_one_process(
    change: Change, how: str
):
    """Unwrapped, changed and wrapped again it trains as one process does."""
    plain = net()
    train(plain, [0, 1], 0)
    change(plain)
    train(plain, [0, 1], 2)
    state = run_threads(2, changed_late, how, change)[0]
    for name, value in plain.state_dict().items():
        assert difference(state[name], value) <= 1e-10, name


def changed_where_held(world: World, how: str, change: Change, folder: Path) -> None:
    """A change of a model that a pipe or an engine has."""
    if how == "Pipe":
        model = sw.Pipe(net(), 1, world=world)
        train(model, [0], 0)
        change(model)
        acts = [lambda: model(rows(0, 0)), lambda: sw.full_state_dict(model)]
        assert_refused([*acts, lambda: sw.unwrap(model)], CHANGES[change])
        return
    made = sw.parallelize(net(), how, world, loss=squares, least_unit_bytes=0)
    made.step(rows(0, 0))
    change(made.model)
    calls = [lambda: made.step(rows(0, 0)), lambda: made.evaluate(rows(0, 0))]
    calls += [lambda: sw.full_state_dict(made), lambda: sw.save(made, folder)]
    assert_refused(calls, f"{CHANGES[change]}.*a new engine")


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("how", "change"),
    [
        *(("zero3 fp64", new_weight), ("ddp fp64", unfreeze), ("pp2 1f1b:1 fp64", adapter)),
        *(("Pipe", new_head), ("Pipe", adapter)),
    ],
)
def test_a_pipe_or_an_engine_refuses_a_change_on_every_rank(
    how: str, change: Change, tmp_path: Path
):
    """In each call, in the same words, also where the changed layer is another rank's."""
    run_threads(2, changed_where_held, how, change, tmp_path)


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
