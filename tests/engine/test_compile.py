"""torch.compile of models and blocks, before and after they are wrapped: the same training."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from tests.engine import loops
from tests.engine.cases import difference, regression, settled
from tests.pool import run_gloo

#: Ways to compile: on the plain module, and on the wrapped one.
Change = Callable[[nn.Module, str], nn.Module]


class Block(nn.Module):
    """Large enough that its linear layers are computed by nodes of ours where nothing compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 4200), nn.Linear(4200, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks, a buffer and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 16), nn.Linear(16, 6)
        self.register_buffer("shift", torch.linspace(0, 1, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def model() -> nn.Module:
    return settled(Model()).double()


def kept(module: nn.Module, backend: str) -> nn.Module:
    return module


def outer(module: nn.Module, backend: str) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[return-value]


def inner(module: nn.Module, backend: str) -> nn.Module:
    module.compile(backend=backend)
    return module


def blocks(module: nn.Module, backend: str) -> nn.Module:
    found = module.get_submodule("blocks")
    for name, block in list(found.named_children()):
        setattr(found, name, torch.compile(block, backend=backend))
    return module


def blocks_inner(module: nn.Module, backend: str) -> nn.Module:
    for block in module.get_submodule("blocks").children():
        block.compile(backend=backend)
    return module


WHENS: dict[str, tuple[Change, Change]] = {
    "model before": (outer, kept),
    "model.compile() before": (inner, kept),
    "model after": (kept, outer),
    "blocks before": (blocks, kept),
    "block.compile() before": (blocks_inner, kept),
    "blocks after": (kept, blocks),
}


def looped(module: nn.Module, shares: list[int], wrapped: bool) -> list[Tensor]:
    """Three steps, gradients accumulated in each, then an output in eval mode."""
    optim = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    found: list[Tensor] = []
    for step in range(3):
        for micro in range(2):
            for rank in shares:
                loss = module(loops.rows(2 * step + micro, rank)).square().mean()
                (loss if wrapped else loss / len(shares)).backward()
        optim.step()
        optim.zero_grad()
    module.eval()
    with torch.no_grad():
        found.append(module(loops.rows(9, 0)))
    return found


def counted() -> tuple[int, int]:
    """Graphs that were made, and how often a frame was broken into several."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def started() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def compiled(world: World, how: str, when: str, backend: str) -> tuple[list[Tensor], int, int]:
    started()
    before, after = WHENS[when]
    module = before(model(), backend)
    if how == "DDP":
        module = sw.DDP(module, world)
    else:
        module = sw.FSDP(module, how, units=Block, world=world)
    return looped(after(module, backend), [world.rank], True), *counted()


CASES = [
    *[("FULL_SHARD", when, "eager") for when in WHENS],
    *[("DDP", when, "eager") for when in ("model before", "blocks after")],
    ("FULL_SHARD", "block.compile() before", "aot_eager"),
    ("SHARD_GRAD_OP", "block.compile() before", "aot_eager"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("how", "when", "backend"), CASES)
def test_compiled_models_and_blocks_train_as_plain_ones(how: str, when: str, backend: str):
    """As without a compiler on one process; blocks share a graph, which breaks nowhere.

    Of a whole model, a graph ends where a unit begins and ends: no more often than there are units.
    """
    expected = looped(model(), [0, 1], False)
    for found, graphs, breaks in run_gloo(2, compiled, how, when, backend):
        assert all(difference(a, b) <= 1e-10 for a, b in zip(found, expected, strict=True))
        assert 1 <= graphs <= 8
        assert breaks == 0 if "block" in when else breaks <= 5


ENGINES = [
    ("dp2 zero3 fp64", "model.compile() before"),
    ("dp2 zero3 fp64", "blocks before"),
    ("dp2 ddp accumulate:2 fp64", "block.compile() before"),
]


def by_engine(world: World, plan: str, when: str) -> tuple[dict[str, Tensor], int]:
    started()
    module = WHENS[when][0](model(), "eager")
    recipe = sw.SGD(lr=0.05, momentum=0.9)
    engine = sw.parallelize(module, plan, world, optimizer=recipe, loss=regression, units=Block)
    for step in range(3):
        x = loops.rows(step, engine.data_rank)
        engine.step((x, x.cos()))
    return sw.full_state_dict(engine), counted()[0]


@pytest.mark.parametrize(("plan", "when"), ENGINES)
def test_engines_train_compiled_models_under_data_parallelism(plan: str, when: str):
    """The weights after three steps are those of the plain model, under the same names."""
    plain = model()
    optim = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        x = torch.cat([loops.rows(step, rank) for rank in range(2)])
        regression(plain, (x, x.cos())).backward()
        optim.step()
        optim.zero_grad()
    (state, graphs), _ = run_gloo(2, by_engine, plan, when)
    expected = plain.state_dict()
    assert graphs >= 1
    assert list(state) == list(expected)
    assert all(difference(state[name], expected[name]) <= 1e-10 for name in expected)


TABLE = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
LOOPS = ["sw.Pipe", "sw.DataParallel", "DDP", "FULL_SHARD"]
FOLLOWED = [(how, when) for how in LOOPS for when in WHENS]
FOLLOWED += [(how, when) for how in ("tp2", "pp2 gpipe:2") for when in list(WHENS)[:2]]


def wrapped(world: World, how: str, when: str) -> dict[str, Tensor]:
    """Two steps with what a loop calls: the norm of its gradients, and the weights of the others.

    Of the weights, under the names of the checkpoint, after `sw.unwrap` too.
    """
    before, after = WHENS[when]
    module, shared = before(model(), "eager"), how in ("tp2", "pp2 gpipe:2", "sw.Pipe")
    x = torch.cat([loops.rows(0, rank) for rank in range(2)])
    if how in ("tp2", "pp2 gpipe:2"):
        recipe, table = sw.SGD(lr=0.05), TABLE
        loss = torch.compile(regression, backend="eager")
        engine = sw.parallelize(
            module, f"{how} fp64", world, optimizer=recipe, loss=loss, table=table, clip=0.1
        )
        after(engine.model, "eager")
        for _ in range(2):
            engine.step((x, x.cos()))
        return sw.full_state_dict(engine)
    if how == "sw.DataParallel":
        module, shared = sw.DataParallel(module, ["cpu", "cpu"]), True
    elif how == "sw.Pipe":
        module = sw.Pipe(module, 2, world=world)
    else:
        module = sw.DDP(module, world) if how == "DDP" else sw.FSDP(module, how, world=world)
    module = after(module, "eager") if "blocks" not in when or how != "sw.DataParallel" else module
    optim = torch.optim.SGD(module.parameters(), lr=0.05)
    own = x if shared else loops.rows(0, world.rank)
    for _ in range(2):
        with sw.no_sync(module) if how in ("DDP", "FULL_SHARD") else nullcontext():
            (regression(module, (own, own.cos())) * 0).backward()
        regression(module, (own, own.cos())).backward()
        sw.clip_grad_norm(module, 0.1)
        optim.step()
        optim.zero_grad()
    state = {} if how == "sw.DataParallel" else sw.full_state_dict(module)
    plain = sw.unwrap(module).state_dict()
    plain = {name.replace("_orig_mod.", ""): value for name, value in plain.items()}
    assert all(torch.equal(state[name], plain[name]) for name in state)
    return plain


@pytest.mark.cases(2)
@pytest.mark.parametrize(("how", "when"), FOLLOWED)
def test_compiled_models_train_in_every_wrapper(how: str, when: str):
    """Compiled before or after; `no_sync`, clipping, `unwrap` and names are as without a compiler.

    Where operations are followed, the compiler is not used.
    """
    alone, x = model(), torch.cat([loops.rows(0, rank) for rank in range(2)])
    optim = torch.optim.SGD(alone.parameters(), lr=0.05)
    for _ in range(2):
        regression(alone, (x, x.cos())).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
    expected = alone.state_dict()
    state = run_gloo(1 if how == "sw.DataParallel" else 2, wrapped, how, when)[0]
    assert list(state) == list(expected)
    assert all(difference(state[name], expected[name]) <= 1e-8 for name in expected)


def resumed(world: World, folder: str) -> dict[str, Tensor]:
    """A checkpoint of compiled blocks, in a module that is not compiled."""
    module = sw.FSDP(blocks(model(), "eager"), world=world)
    with torch.no_grad():
        for p in module.parameters():
            p.data = p.data * 2
    sw.save(module, folder)
    plain = sw.FSDP(model(), world=world)
    sw.load(plain, folder)
    return sw.full_state_dict(plain)


def test_a_checkpoint_has_plain_names(tmp_path: Path):
    """Whether or not blocks were compiled."""
    state = run_gloo(2, resumed, str(tmp_path / "saved"))[0]
    expected = model().state_dict()
    assert all(torch.equal(state[n], v * (1 + (n != "shift"))) for n, v in expected.items())
