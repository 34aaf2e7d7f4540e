"""Gates, beside what tests/verify proves of them: hashes, refusals, queues' rules."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from shardwise.core.mesh import Mesh
from shardwise.techniques.expert.apply import layers_of
from shardwise.techniques.expert.gate import Extra, Gate
from shardwise.techniques.expert.gates import hashed, key_of, uniform
from shardwise.techniques.expert.moe_layer import MoE
from shardwise.techniques.expert.routing import GlobalBatch, queues
from shardwise.train.config_sections import ModelSection
from shardwise.train.model import model_sizes
from tests.pool import run_threads

F64 = torch.float64
ALONE = GlobalBatch()


def logits_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=draw, dtype=F64)


@given(
    st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from([None, 1.0, 1.25, 2])
)
@settings(max_examples=40, deadline=None)
def test_queues(n: int, k: int, experts: int, factor: float | None):
    """First choices of all tokens go before second ones, and what is beyond capacity is dropped."""
    draw = torch.Generator().manual_seed(100 * n + 10 * k + experts)
    chosen = torch.randint(experts, (n, k), generator=draw)
    wanted = torch.rand(n, k, generator=draw) < 0.8
    found = queues((chosen, wanted), logits_of(n, experts), factor, ALONE)
    length, capacity = [0] * experts, math.ceil((factor or 1e9) * n * k / experts)
    expected = [[-1] * k for _ in range(n)]
    for slot, t in ((slot, t) for slot in range(k) for t in range(n) if wanted[t, slot]):
        e = int(chosen[t, slot])
        expected[t][slot] = length[e] if length[e] < capacity else -1
        length[e] += 1
    assert found.positions.tolist() == expected
    assert found.loads.tolist() == [[min(x, capacity) for x in length]]
    assert found.wanted_by_choice.sum(0).tolist() == length
    assert found.dropped == sum(max(0, x - capacity) for x in length)


def test_bias_balances_the_load():
    """Updated after each step, the bias brings a layer that prefers one expert to an even load."""
    logits = logits_of(400, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0], dtype=F64)
    layer, wanted = MoE(4, 4, Gate("sigmoid", 4, 1), bias_rate=0.01).double(), list[Tensor]()
    assert layer.router is not None
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
        for _ in range(300):
            layer(logits)
            wanted.append(layer.get_buffer("choices").clone())
    assert wanted[0].max() > 250
    assert wanted[-1].max() < 1.2 * 100


def test_hashes_and_random_numbers_are_uniform():
    """Token ids spread evenly over experts; random numbers differ by seed, layer and pass."""
    counts = hashed(torch.arange(8000), 8).bincount(minlength=8)
    assert counts.min() > 850
    assert counts.max() < 1150
    rows, key = torch.arange(4000), key_of(0, "blocks.0.moe")
    found = uniform(rows, key, 0)
    assert abs(float(found.mean()) - 0.5) < 0.02
    assert abs(float(found.var()) - 1 / 12) < 0.005
    others = key_of(1, "blocks.0.moe"), key_of(0, "blocks.1.moe")
    for other in (uniform(rows, key, 1), *(uniform(rows, each, 0) for each in others)):
        assert abs(float(torch.corrcoef(torch.stack([found, other]))[0, 1])) < 0.05


# --- gates that change with each pass -------------------------------------------------------------


def layer(name: str, seed: int = 0) -> sw.MoE:
    torch.manual_seed(0)
    return sw.MoE(8, 8, sw.Gate(name, experts=4, k=2), seed=seed)


@pytest.mark.parametrize("name", ["gshard", "noisy-topk"])
def test_each_pass_layer_and_seed_draws_other_numbers(name: str):
    """Whatever torch's seed; a loaded layer goes on, and layers of one seed differ by name."""
    x, first = torch.randn(64, 8), layer(name)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(first(x)[0].detach())
    loaded = layer(name)
    assert torch.equal(made[0], loaded(x)[0])
    made.append(layer(name, seed=1)(x)[0])
    again = layer(name)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(made[1], again(x)[0])
    model = nn.ModuleDict({key: layer(name) for key in ("a", "b")})
    loss = lambda m, x: m["a"](x)[0].sum() + m["b"](x)[0].sum()  # noqa: E731
    for key in ("a", "b"):
        model[key].register_forward_hook(lambda *args: made.append(args[2][0].detach()))
    sw.parallelize(model, "", alone(), optimizer=sw.AdamW(lr=0.0), loss=loss).step(x)
    assert not any(torch.equal(made[a], made[b]) for a in range(5) for b in range(a))


def test_the_seed_of_a_run_is_that_of_its_gates():
    """`train.seed` reaches every layer of experts of the model."""
    sizes = model_sizes(ModelSection(experts=4, gate="gshard"), 256, seed=7)
    with torch.device("meta"):
        layers = layers_of(sizes.build())
    assert [each.seed for each in layers.values()] == [7] * len(layers)


@pytest.mark.parametrize("name", ["gshard", "sigmoid"])
def test_other_recomputation_is_refused(name: str):
    """torch.utils.checkpoint cannot repeat such a pass, and the error says what to write."""
    own, x = layer(name), torch.randn(6, 8, requires_grad=True)
    made: Any = checkpoint(lambda x: own(x)[0], x, use_reentrant=False)
    with pytest.raises(RunError, match="the plan word recompute"):
        made.sum().backward()


# --- refused --------------------------------------------------------------------------------------

NAN = math.nan
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"name": "swich"}, r'the gate "swich".*Write instead: gate = "switch"'),
    ({"k": 5}, r"k=5 with 4 experts.*Write instead: k=4, or experts=5"),
    ({"k": 1.5}, r"k=1\.5.*k=2"),
    ({"name": "switch", "k": 2}, r'k=2 under the gate switch.*sw\.Gate\("switch"'),
    ({"name": "hash", "losses": {"z": 1.0}}, r"losses = \{'z': 1.0\} under the gate hash"),
    *(({"capacity": c}, r"capacity = .*Write instead: capacity = 1\.25") for c in (0.5, NAN)),
    ({"losses": {"balanc": 1.0}}, r'the loss "balanc".*balance'),
    *(({"experts": e}, f"experts={e!r}.*Write instead: experts=8") for e in ("4", 0)),
]
LAYERS: list[tuple[tuple[Any, ...], str]] = [
    ((0, 8), "width=0"),
    ((8, 2.5), r"hidden=2\.5"),
    ((8, 8, "topk"), "the gate 'topk'"),
    ((8, 8, Gate("topk", 4), None, 0.1), r"bias_rate = 0\.1 under the gate topk, which has no"),
    ((8, 8, Gate("gshard", 4), None, 1e-3, -1), "seed=-1"),
]
REFUSED: list[tuple[Any, str]] = [
    *((lambda o=o: Gate(**({"name": "topk", "experts": 4} | o)), said) for o, said in OPTIONS),
    *((lambda a=a: MoE(*a, *[Gate("topk", 4)][: len(a) < 3]), said) for a, said in LAYERS),
    (lambda: Gate("hash", 4).route(logits_of(2, 4), ALONE), "without the expert of each token"),
    *(
        (
            lambda t=t: Gate("assigned", 4).route(logits_of(2, 4), ALONE, Extra(target=t)),
            "integers from 0 to 3, for 4 experts",
        )
        for t in (torch.tensor([0, 4]), torch.tensor([-1, 2]))
    ),
]


@pytest.mark.cases(len(REFUSED))
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_refused(call: Any, said: str):
    """A gate or layer that cannot work, and experts that do not exist, with what to write."""
    with pytest.raises(InputError, match=said):
        call()


def assigned_wrongly(world: World, wrong: Tensor) -> None:
    """Only rank 1 is given experts that do not exist."""
    layer = MoE(8, 8, Gate("assigned", 4))
    batch = GlobalBatch((world.on(Mesh.parse("dp2")).axis("dp"),))
    layer.place = replace(layer.place, batch=batch, name="blocks.3.moe")
    with pytest.raises(InputError, match=r"blocks\.3\.moe, .* on data rank 1\."):
        layer(torch.randn(3, 8), wrong if world.rank else torch.tensor([0, 3, 1]))


def test_experts_of_one_rank_that_do_not_exist():
    """An assignment that one rank cannot use is an error on all, with the layer and the rank."""
    wrong: list[list[float]] = [[4, 0, -1], [0, -2, 1], [0.0, NAN, 2.0]]
    for target in wrong:
        run_threads(2, assigned_wrongly, torch.tensor(target))
