"""Gates that change with each pass: the same in one process, in stages and in recomputations."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RunError
from shardwise.models import decoder
from shardwise.models.initial import fill
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.passes import key_of, uniform
from shardwise.train.config_sections import ModelSection
from shardwise.train.sizes import model_sizes
from tests.engine.cases import Case
from tests.engine.tensors import build
from tests.expert import moe
from tests.pool import run_threads


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "plan"),
    [("gshard", "dp2 ep2 pp2 1f1b:2"), ("noisy-topk", "pp2 interleaved:4x2")],
)
def test_random_gates_in_a_pipeline(name: str, plan: str):
    """Stages draw the numbers of one process, and so choose the same experts."""
    moe.holds(moe.task(name, 1.0, rows=17), plan)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words"),
    [("noisy-topk", "pp2 1f1b:4"), ("sigmoid", "pp2 1f1b:4"), ("gshard", "accumulate:4")],
)
def test_recomputation_repeats_a_pass(name: str, words: str):
    """A recomputation routes as its forward pass did, after other microbatches have run."""
    moe.holds(moe.task(name, rows=16), f"dp2 ep2 {words} recompute:full")


def most_kept(world: World, words: str) -> tuple[int, int, bool]:
    """The most passes that a layer keeps in a step, those after it, and whether as tensors."""
    engine = build(world, moe.task("sigmoid", rows=8), Case(f"dp2 ep2 {words} fp64"))
    layers = list(layers_of(engine.model).values())
    seen: list[int] = []
    kinds: list[bool] = []

    def see(module: nn.Module, *_: object) -> None:
        assert isinstance(module, sw.MoE)
        seen.append(len(module.pass_records.values))
        kinds.extend(isinstance(found, Tensor) for found in module.pass_records.values.values())

    for each in layers:
        each.register_forward_hook(see)
    for step in range(2):
        engine.step(moe.batch("sigmoid", 4, step))
    return max(seen), sum(len(each.pass_records.values) for each in layers), all(kinds)


def test_only_passes_that_are_recomputed_are_kept():
    """A layer keeps a step's biases as tensors while they may be repeated, and none afterwards."""
    assert run_threads(2, most_kept, "accumulate:4") == [(0, 0, True)] * 2
    assert run_threads(2, most_kept, "accumulate:4 recompute:full") == [(4, 0, True)] * 2


def layer(name: str) -> sw.MoE:
    torch.manual_seed(0)
    return sw.MoE(8, 8, sw.Gate(name, experts=4, k=2))


@pytest.mark.parametrize("name", ["gshard", "noisy-topk"])
def test_each_pass_draws_other_numbers(name: str):
    """Two passes over the same tokens differ, whatever torch's seed, and a loaded layer goes on."""
    x, first, second = torch.randn(64, 8), layer(name), layer(name)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(1)
    made = first(x)[0]
    torch.manual_seed(1)
    again = first(x)[0]
    assert not torch.equal(made, again)
    assert torch.equal(made, second(x)[0])
    loaded = layer(name)
    loaded.load_state_dict(second.state_dict())
    assert torch.equal(again, loaded(x)[0])


class TwoLayers(nn.Module):
    """Two layers of experts with the same seed and the same weights, beside each other."""

    def __init__(self, name: str = "gshard", seed: int = 0) -> None:
        super().__init__()
        gate = sw.Gate(name, experts=4, k=2)
        self.first, self.second = (sw.MoE(8, 8, gate, seed=seed) for _ in range(2))
        fill(self, seed=3)
        self.second.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x)[0], self.second(x)[0]


@pytest.mark.parametrize("name", ["gshard", "noisy-topk"])
def test_each_layer_and_seed_draws_other_numbers(name: str):
    """Layers of one model with one seed draw different numbers, and other ones by the seed."""
    x, made = torch.randn(64, 8), list[Tensor]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made.extend(each.detach() for each in model(x))
        return made[-1].sum() * 0.0 + sum(p.sum() for p in model.parameters())

    for seed in (0, 1, 0):
        model = TwoLayers(name, seed)
        sw.parallelize(model, "", sw.init(), optimizer=sw.AdamW(lr=0.0), loss=loss).step(x)
    pairs = [(a, b) for a in range(4) for b in range(a)]
    assert not any(torch.equal(made[a], made[b]) for a, b in pairs)
    assert torch.equal(made[0], made[4])
    assert torch.equal(made[1], made[5])


def test_the_seed_of_a_run_is_that_of_its_gates():
    """`train.seed` reaches every layer of experts of the model."""
    sizes = model_sizes(ModelSection(experts=4, gate="gshard"), 256, seed=7)
    with torch.device("meta"):
        layers = layers_of(decoder.build(sizes))
    assert [each.seed for each in layers.values()] == [7] * len(layers)


def test_numbers_are_uniform():
    """The hash of places spreads evenly between 0 and 1, differently by seed, layer and pass."""
    rows, key = torch.arange(4000), key_of(0, "blocks.0.moe")
    found = uniform(rows, key, 0)
    assert abs(float(found.mean()) - 0.5) < 0.02
    assert abs(float(found.var()) - 1 / 12) < 0.005
    others = key_of(1, "blocks.0.moe"), key_of(0, "blocks.1.moe")
    for other in (uniform(rows, key, 1), *(uniform(rows, each, 0) for each in others)):
        assert abs(float(torch.corrcoef(torch.stack([found, other]))[0, 1])) < 0.05


@pytest.mark.parametrize("name", ["gshard", "sigmoid"])
def test_other_recomputation_is_refused(name: str):
    """torch.utils.checkpoint cannot repeat such a pass, and the error says what to write."""
    x = torch.randn(6, 8, requires_grad=True)
    own = layer(name)
    made = checkpoint(lambda x: own(x)[0], x, use_reentrant=False)
    assert isinstance(made, torch.Tensor)
    with pytest.raises(RunError, match="the plan word recompute"):
        made.sum().backward()
