"""Models on the meta device: each rank makes its part, as one process would have made the whole."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from shardwise.engine.state.box import Box
from shardwise.models import gpt
from shardwise.models.trainable import fill, initial
from tests.engine.cases import PLANS, ranks_of, squares, text
from tests.engine.tensors import SHAPES, assert_pieces, mine, pieces
from tests.engine.zoo import Block, Stack
from tests.pool import run_gloo, run_threads


def born_pieces(world: World, plan: str, own: bool, shape: str) -> list[Box]:
    """The weights of a GPT on meta, made by a fill or by its own modules; it takes a step."""
    with torch.device("meta"):
        model = gpt.GPT(SHAPES[shape])
    named: dict[str, Any] = {"loss": gpt.loss, "tokens": gpt.tokens, "units": 1}
    named |= {"seed": 5} if own else {"fill": partial(initial, seed=5)}
    engine = sw.parallelize(model, plan, world, **named)
    found = pieces(engine.boxes(), "model/")
    engine.step(mine(engine, text(0, rows=8)))
    return found


BORN = [
    *("tp2", "tp4 sp", "dp2 tp2 zero3", "pp2 tp2 gpipe:4", "dp2 zero3 tile:3=*"),
    *("pp2 1f1b:4", "pp2 dp2 zero3 zb-v:2", "dp2 zero3 bf16", "ddp", *PLANS),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("own", [False, True], ids=["filled", "by its modules"])
@pytest.mark.parametrize("plan", BORN)
def test_parts_and_stages_of_a_meta_model_begin_as_in_one_process(plan: str, own: bool):
    """Each rank has what one process would have made for it, to the bit; and trains."""
    shape = "untied" if "tp" in plan or "tile" in plan else "tied"
    if own:
        whole = {piece.name: piece.tensor for piece in born_pieces(alone(), "fp32", own, shape)}
    else:
        fill(plain := gpt.GPT(SHAPES[shape]), seed=5)
        whole = {name: p.detach() for name, p in plain.named_parameters()}
    if "bf16" in plan:
        whole = {name: x.bfloat16().float() for name, x in whole.items()}
    # modules draw from the state of their process, which threads would share
    on_ranks = run_gloo if own else run_threads
    plan = plan if "bf16" in plan else f"{plan} fp32"
    found = on_ranks(ranks_of(plan), born_pieces, plan, own, shape)
    assert_pieces(found, whole, 0.0)


class Marked(nn.Parameter):
    """A class of parameters, as libraries mark them."""


class Odd(nn.Module):
    """A parameter of another class, with an attribute and a hook; one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.first.weight = Marked(self.first.weight.detach())
        self.first.weight.rate_scale = 2.0  # type: ignore[attr-defined]
        self.nothing = nn.Linear(6, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight.rate_scale == 2.0  # type: ignore[attr-defined]
        return self.first(x) + self.nothing(x).sum()


def odd_ones(world: World, how: str, folder: str) -> dict[str, Tensor]:
    """Built on meta and trained; saved and loaded by an engine."""
    seen: list[tuple[int, ...]] = []
    with torch.device("meta"):
        model: nn.Module = Odd()
    weight = model.get_parameter("first.weight")
    weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    if how == "FSDP":
        sw.FSDP(model, units=1, world=world)(torch.ones(2, 6)).sum().backward()
        state = sw.full_state_dict(model)
    else:
        named: dict[str, Any] = {"units": 1, "least_unit_bytes": 0}
        engine = sw.parallelize(model, how, world, optimizer=sw.AdamW(), loss=squares, **named)
        engine.step(torch.ones(4, 6))
        sw.save(engine, folder)
        sw.load(engine, folder)
        state = sw.full_state_dict(engine)
    assert weight is dict(model.named_parameters())["first.weight"]
    assert (type(weight), weight.rate_scale) == (Marked, 2.0)  # type: ignore[attr-defined]
    assert set(seen) == {(6, 6)}
    return state


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("how", ["FSDP", "zero3 fp32", "ddp fp32", "zero1 fp32 recompute:first"])
def test_unusual_parameters_stay_what_they_are(how, tmp_path):
    """Classes, attributes and hooks on meta; a parameter without elements is in every state."""
    state = run_gloo(2, odd_ones, how, str(tmp_path))[0]
    shapes = {name: tuple(p.shape) for name, p in state.items()}
    assert shapes == {"first.weight": (6, 6), "first.bias": (6,), "nothing.weight": (0, 6)}


def mixture() -> nn.Module:
    """Modules of torch.nn that make their own weights, and buffers."""
    layers = [nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2)]
    parts = {"table": nn.Embedding(7, 8), "layers": nn.ModuleList(layers)}
    return nn.ModuleDict(parts | {"norm": nn.BatchNorm1d(8), "head": nn.Linear(8, 3)})


def own_weights(seed: int) -> dict[str, Tensor]:
    state = torch.random.get_rng_state()
    with torch.device("meta"):
        model = mixture()
    engine = sw.parallelize(model, "fp32", alone(), seed=seed)
    assert torch.equal(state, torch.random.get_rng_state())
    return engine.model.state_dict()


def test_modules_make_their_own_weights():
    """By reset_parameters, keyed by seed and name: norms are ones, matrices within bounds."""
    expected = own_weights(1)
    assert torch.equal(expected["norm.running_var"], torch.ones(8))
    assert expected["norm.num_batches_tracked"] == 0
    assert not torch.equal(own_weights(2)["head.weight"], expected["head.weight"])
    assert torch.equal(expected["norm.weight"], torch.ones(8))
    assert torch.equal(expected["layers.0.self_attn.in_proj_bias"], torch.zeros(24))
    bound = 8**-0.5
    assert 0.5 * bound < expected["head.weight"].abs().max() <= bound
    assert expected["table.weight"].std() > 0.7
    assert not torch.equal(expected["layers.0.linear1.weight"], expected["layers.1.linear1.weight"])


def live_bytes() -> int:
    """Bytes of every tensor that Python holds, each storage once."""
    storages = {}
    for held in gc.get_objects():
        if issubclass(type(held), Tensor) and not held.is_meta:
            storage = held.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("row", ["zero3", "ddp"])
def test_a_model_is_built_one_unit_at_a_time(
    row, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Under zero3 on 8 ranks never more than this rank's part and one unit; the whole under ddp."""
    monkeypatch.setattr("shardwise.techniques.data.apply.LEAST_BYTES", 0)
    with torch.device("meta"):
        model = Stack(*[Block(2000) for _ in range(16)])
    whole_bytes = 4 * sum(p.numel() for p in model.parameters())
    unit_bytes = whole_bytes // 16
    gc.collect()
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # what there is already is not looked through again and again
    peak = [0]

    def watched(name: str, tensor: Tensor) -> None:
        peak[0] = max(peak[0], live_bytes())
        tensor.fill_(len(name))

    plan = f"dp8 {row} fp32 buffers:8KiB"
    engine = sw.parallelize(model, plan, traced(3, 8), fill=watched, units=Block)
    assert len(engine.flats) == 16
    bound = whole_bytes / 8 + 1.2 * unit_bytes
    assert (peak[0] <= bound) == (row == "zero3")
    assert live_bytes() <= (whole_bytes / 8 * 1.1 if row == "zero3" else whole_bytes * 1.1)


class Ramp(nn.Module):
    """A parameter without a rule for its value, and a buffer that only the constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.register_buffer("ramp", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.token + self.get_buffer("ramp")


def ramp(reset: bool) -> nn.Module:
    """A ramp on meta beside a buffer that is not; with `reset` it can set its own again."""
    with torch.device("meta"):
        model = Ramp()
    model.register_buffer("kept", torch.full((3,), 7.0))
    if reset:
        values = torch.arange(4.0)
        vars(model)["reset_buffers"] = lambda: model.get_buffer("ramp").copy_(values)
    return model


def test_what_nothing_sets_is_refused():
    """It would be zero without a word; a buffer beside one on meta keeps its value."""
    with pytest.raises(InputError, match=r"the buffer ramp on the meta device.*reset_buffers"):
        sw.parallelize(ramp(reset=False), "fp32", alone())
    with pytest.raises(InputError, match=r"token .* its Ramp initialises.*fill="):
        sw.parallelize(ramp(reset=True), "fp32", alone())
    fill: Any = lambda _, tensor: tensor.fill_(2.0)  # noqa: E731
    model = sw.parallelize(ramp(reset=True), "fp32", alone(), fill=fill).model
    found = {name: x.tolist() for name, x in (*model.named_buffers(), *model.named_parameters())}
    assert found == {"kept": [7.0] * 3, "ramp": [0.0, 1.0, 2.0, 3.0], "token": [2.0] * 4}
