"""Gates against their papers' equations, written out token by token."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import InputError
from shardwise.techniques.expert import gates, hard
from shardwise.techniques.expert.gate import GATES, Extra, Gate
from shardwise.techniques.expert.global_batch import GlobalBatch
from shardwise.techniques.expert.moe_layer import MoE
from shardwise.techniques.expert.routing import queues

F64 = torch.float64
ALONE = GlobalBatch()


def logits_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=draw, dtype=F64)


def softmax(line: list[float]) -> list[float]:
    powers = [math.exp(x) for x in line]
    return [x / sum(powers) for x in powers]


def best(line: list[float], k: int) -> list[int]:
    return sorted(range(len(line)), key=lambda e: -line[e])[:k]


def by_token(name: str, line: list[float], k: int) -> tuple[list[int], list[float]]:
    """The experts of one token and their weights, by the papers' equations."""
    p = softmax(line)
    if name == "switch":
        return best(p, 1), [max(p)]
    if name == "topk":
        return best(p, k), [p[e] for e in best(p, k)]
    if name in ("topk-renormalised", "gshard"):
        chosen = best(p, k)
        return chosen, [p[e] / sum(p[i] for i in chosen) for e in chosen]
    if name in ("topk-softmax-after", "noisy-topk"):
        return best(line, k), softmax([line[e] for e in best(line, k)])
    raise AssertionError(name)


SOFT = ["switch", "gshard", "topk", "topk-renormalised", "topk-softmax-after", "noisy-topk"]


@pytest.mark.parametrize("name", SOFT)
def test_softmax_gates(name: str):
    """Experts and weights are those of the paper's equation, token by token."""
    logits, k = logits_of(20, 5), GATES[name] or 3
    choice = Gate(name, 5, k).choose(logits, Extra())
    for row, line in enumerate(logits.tolist()):
        experts, weights = by_token(name, line, k)
        assert choice.experts[row].tolist() == experts
        assert choice.weights[row].tolist() == pytest.approx(weights, rel=1e-12)


def test_second_expert_policy():
    """GShard uses the second expert where twice its weight exceeds the random number."""
    logits = logits_of(50, 4)
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=F64)
    choice = gates.gshard(logits, uniform)
    assert choice.wanted is not None
    second = [
        2 * w > u for w, u in zip(choice.weights[:, 1].tolist(), uniform.tolist(), strict=True)
    ]
    assert choice.wanted.tolist() == [[True, use] for use in second]
    assert 0 < sum(second) < 50


def test_noise_changes_the_choice():
    """Noisy top-k is the top-k of logits plus normal times softplus of the spread."""
    logits, spread, normal = (logits_of(20, 5, seed) for seed in range(3))
    noisy = Gate("noisy-topk", 5, 2).choose(logits, Extra(random=normal, spread=spread))
    line = logits + normal * (1 + spread.exp()).log()
    for row, values in enumerate(line.tolist()):
        experts, weights = by_token("noisy-topk", values, 2)
        assert noisy.experts[row].tolist() == experts
        assert noisy.weights[row].tolist() == pytest.approx(weights, rel=1e-12)


def test_sigmoid_bias_chooses_and_does_not_weigh():
    """The bias of DeepSeek-V3 decides which experts are used, and not their weights."""
    logits, bias = logits_of(20, 5), torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0], dtype=F64)
    choice = gates.sigmoid(logits, 2, bias, scale=2.5)
    for row, line in enumerate(logits.tolist()):
        scores = [1 / (1 + math.exp(-x)) for x in line]
        chosen = best([s + 9 * (e == 1) for e, s in enumerate(scores)], 2)
        weights = [2.5 * scores[e] / sum(scores[i] for i in chosen) for e in chosen]
        assert chosen[0] == 1
        assert choice.experts[row].tolist() == chosen
        assert choice.weights[row].tolist() == pytest.approx(weights, rel=1e-12)


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


def test_expert_choice_takes_the_best_tokens():
    """Each expert takes its share of the tokens: those with its largest probabilities."""
    logits = logits_of(12, 3)
    routing = Gate("expert-choice", 3, 2).route(logits, ALONE)
    p = [softmax(line) for line in logits.tolist()]
    for e in range(3):
        taken = sorted(range(12), key=lambda t: -p[t][e])[:8]  # 12 tokens * 2 / 3 experts
        places = routing.positions[:, e].tolist()
        assert [places.index(place) for place in range(8)] == taken
        assert sorted(places)[:4] == [-1] * 4
        assert routing.weights[taken, e].tolist() == pytest.approx([p[t][e] for t in taken])


@given(
    st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from([None, 1.0, 1.25, 2])
)
@settings(max_examples=60, deadline=None)
def test_queues(n: int, k: int, experts: int, factor: float | None):
    """First choices of all tokens go before second ones, and what is beyond capacity is dropped."""
    draw = torch.Generator().manual_seed(100 * n + 10 * k + experts)
    chosen = torch.randint(experts, (n, k), generator=draw)
    wanted = torch.rand(n, k, generator=draw) < 0.8
    found = queues((chosen, wanted), logits_of(n, experts), factor, ALONE)
    length, capacity = [0] * experts, math.ceil((factor or 1e9) * n * k / experts)
    expected = [[-1] * k for _ in range(n)]
    for slot in range(k):
        for t in range(n):
            e = int(chosen[t, slot])
            if wanted[t, slot]:
                expected[t][slot] = length[e] if length[e] < capacity else -1
                length[e] += 1
    assert found.positions.tolist() == expected
    assert found.loads.tolist() == [[min(x, capacity) for x in length]]
    assert found.wanted_by_choice.sum(0).tolist() == length
    assert found.dropped == sum(max(0, x - capacity) for x in length)


def test_losses():
    """Balance, importance and z are the sums of their papers; balance is 1 under an even load."""
    logits = logits_of(30, 4)
    gate = Gate("topk", 4, 2, losses={"balance": 1.0, "importance": 1.0, "z": 1.0})
    routing = gate.route(logits, ALONE)
    p = [softmax(line) for line in logits.tolist()]
    counts = [sum(e in best(line, 2) for line in p) for e in range(4)]
    mean = [sum(line[e] for line in p) / 30 for e in range(4)]
    balance = 4 * sum(c / 60 * m for c, m in zip(counts, mean, strict=True))
    weights = [sum(line[e] for line in p if e in best(line, 2)) for e in range(4)]
    average = sum(weights) / 4
    importance = sum((w - average) ** 2 for w in weights) / 4 / average**2
    z = sum(math.log(sum(map(math.exp, line))) ** 2 for line in logits.tolist()) / 30
    assert float(routing.losses["balance"]) == pytest.approx(balance, rel=1e-12)
    assert float(routing.losses["importance"]) == pytest.approx(importance, rel=1e-12)
    assert float(routing.losses["z"]) == pytest.approx(z, rel=1e-12)
    even = Gate("switch", 4, losses={"balance": 1.0}).route(torch.eye(4, dtype=F64), ALONE)
    assert float(even.losses["balance"]) == pytest.approx(1.0, rel=1e-12)


def test_hash_is_fixed_and_spread():
    """A token id has one expert in every run, and ids spread evenly over the experts."""
    ids = torch.arange(8000)
    experts = hard.hashed(ids, 8, seed=3)
    assert experts.tolist() == hard.hashed(ids, 8, seed=3).tolist()
    counts = experts.bincount(minlength=8).tolist()
    assert min(counts) > 850
    assert max(counts) < 1150
    assert not torch.equal(experts, hard.hashed(ids, 8, seed=4))


def splitmix64(x: int, seed: int) -> int:
    """The published algorithm in Python's integers."""
    mask = (1 << 64) - 1
    z = (x + (seed + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(0, 2**40), st.integers(0, 100))
def test_hash_is_splitmix64(x: int, seed: int):
    """Tensors of signed integers give the bits of splitmix64 on unsigned ones."""
    assert int(hard.mix_bits(torch.tensor([x]), seed)) % (1 << 64) == splitmix64(x, seed)


def test_balanced_clusters():
    """Clusters of a first pass have no more than their share, and separate what is far apart."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10]], dtype=F64)
    features = centres.repeat(10, 1) + 0.1 * torch.randn(30, 2, generator=draw, dtype=F64)
    centroids, clusters = hard.balanced_clusters(features, 3, ALONE, seed=1)
    assert clusters.bincount().tolist() == [10, 10, 10]
    assert torch.equal(hard.nearest(features, centroids), clusters)
    assert all(len(set(clusters[g::3].tolist())) == 1 for g in range(3))
    lopsided = torch.cat([features[:1].expand(20, 2), features[:4]])
    _, clusters = hard.balanced_clusters(lopsided, 3, ALONE)
    assert clusters.bincount().tolist() == [8, 8, 8]


def in_turn(distances: list[list[int]]) -> list[int]:
    """The clusters of features that choose one after the other."""
    experts = len(distances[0])
    room = [-(-len(distances) // experts)] * experts
    near = [sorted(line)[:2] for line in distances]
    found = [0] * len(distances)
    for row in sorted(range(len(distances)), key=lambda row: near[row][0] - near[row][-1]):
        free = [cluster for cluster in range(experts) if room[cluster]]
        found[row] = min(free, key=lambda cluster: distances[row][cluster])
        room[found[row]] -= 1
    return found


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 30), st.integers(0, 10_000))
def test_balanced_clusters_are_chosen_in_turn(experts: int, n: int, most: int, seed: int):
    """Features take the nearest cluster with room, those first that would lose most; ties too."""
    draw = torch.Generator().manual_seed(seed)
    distances = torch.randint(most, (n, experts), generator=draw)
    found = hard._assign_with_room(distances.to(F64))
    assert found.tolist() == in_turn(distances.tolist())


def test_clusters_of_equal_features():
    """Clusters of equal features fill one after the other, and the first is the nearest."""
    features = torch.tensor([[1.0, 2.0, -3.0, 4.0, 0.5]], dtype=F64).expand(10, 5)  # exact means
    centroids, clusters = hard.balanced_clusters(features, 4, ALONE)
    assert clusters.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert hard.nearest(features, centroids).tolist() == [0] * 10


class Largest(TorchDispatchMode):
    """The elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_clusters_take_memory_for_features_and_distances_only():
    """No operation makes a tensor [N, E, D], nor one that is larger than [N, D] and [N, E]."""
    n, experts, width = 96, 8, 16
    with Largest() as largest:
        centroids, _ = hard.balanced_clusters(logits_of(n, width), experts, ALONE)
        hard.nearest(logits_of(n, width), centroids)
    assert largest.elements == n * width


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_nearest(dtype: torch.dtype):
    """The nearest centroid is the same whatever part of the features a rank has."""
    features, centroids = logits_of(3000, 500).to(dtype), logits_of(9, 500, seed=1).to(dtype)
    distances = (features[:, None].double() - centroids.double()).square().sum(-1)
    found = hard.nearest(features, centroids)
    assert torch.equal(found, distances.argmin(-1))
    assert torch.equal(torch.cat([hard.nearest(x, centroids) for x in features.split(7)]), found)
    assert len(hard.nearest(features[:0], centroids)) == 0


def test_clusters_of_too_few_tokens():
    """A first pass with fewer tokens than clusters is refused with both numbers."""
    with pytest.raises(InputError, match="over 3 tokens, to fit 4 clusters"):
        hard.balanced_clusters(logits_of(3, 5), 4, ALONE)


@pytest.mark.parametrize("name", ["assigned", "hash", "cluster", "argmax"])
def test_hard_gates(name: str):
    """A hard gate sends each token to its expert with weight 1, and no gradient to the logits."""
    logits = logits_of(6, 4).requires_grad_()
    target = torch.tensor([3, 0, 2, 2, 1, 0])
    routing = Gate(name, 4).route(logits, ALONE, Extra(target=target))
    assert routing.experts.flatten().tolist() == target.tolist()
    assert routing.weights.flatten().tolist() == [1.0] * 6
    assert not routing.weights.requires_grad


def test_argmax_learns_the_assignment():
    """The logits of argmax are trained by cross-entropy with the assignment it is given."""
    logits = torch.zeros(6, 4, dtype=F64, requires_grad=True)
    target = torch.tensor([3, 0, 2, 2, 1, 0])
    for _ in range(20):
        loss = Gate("argmax", 4).route(logits, ALONE, Extra(target=target)).losses["assignment"]
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 5 * gradient).detach().requires_grad_()
    alone = Gate("argmax", 4).route(logits, ALONE)
    assert alone.experts.flatten().tolist() == target.tolist()


@pytest.mark.parametrize(
    ("options", "given", "instead"),
    [
        ({"name": "swich"}, 'the gate "swich"', 'gate = "switch"'),
        ({"name": "topk", "k": 5}, "k=5 with 4 experts", "k=4, or experts=5"),
        ({"name": "topk", "k": 0}, "k=0", "k=2"),
        ({"name": "switch", "k": 2}, "k=2 under the gate switch", 'sw.Gate("switch"'),
        ({"name": "hash", "losses": {"z": 1.0}}, "losses = {'z': 1.0} under the gate hash", "sw."),
        ({"name": "switch", "capacity": 0.5}, "capacity = 0.5", "capacity = 1.25"),
        ({"name": "switch", "capacity": math.nan}, "capacity = nan", "capacity = 1.25"),
        ({"name": "switch", "losses": {"balanc": 1.0}}, 'the loss "balanc"', "balance"),
        ({"name": "switch", "losses": {"z": -1}}, "the coefficient -1 of the loss z", "losses ="),
        ({"name": "switch", "losses": {"z": math.nan}}, "the coefficient nan", "losses = "),
        ({"name": "switch", "losses": 0.1}, "losses = 0.1", "losses = "),
        ({"name": "topk", "scale": math.nan}, "scale = nan", "scale = 1.0"),
        ({"name": "topk", "scale": math.inf}, "scale = inf", "scale = 1.0"),
        ({"name": "topk", "scale": 0}, "scale = 0", "scale = 1.0"),
        ({"name": "topk", "k": 1.5}, "k=1.5", "k=2"),
        ({"name": "topk", "experts": "4"}, "experts='4'", "experts=8"),
        ({"name": "topk", "experts": 0}, "experts=0", "experts=8"),
        ({"name": "switch", "capacity": "1"}, "capacity = '1'", "capacity = 1.25"),
    ],
)
def test_refused(options: dict[str, object], given: str, instead: str):
    """A gate that cannot work is refused with what to write instead."""
    with pytest.raises(InputError) as error:
        Gate(**({"experts": 4} | options))  # type: ignore[arg-type]
    assert given in str(error.value)
    assert str(error.value).partition("Write instead: ")[2].startswith(instead)


def test_hard_gate_without_experts():
    """A hard gate without an assignment is refused."""
    with pytest.raises(InputError, match="the gate hash without the expert of each token"):
        Gate("hash", 4).route(logits_of(2, 4), ALONE)


@pytest.mark.parametrize("name", ["assigned", "argmax"])
@pytest.mark.parametrize("target", [[0, 4], [-1, 2]])
def test_experts_that_there_are_not(name: str, target: list[int]):
    """An assignment outside of the experts is refused with the range of the experts."""
    extra = Extra(target=torch.tensor(target))
    with pytest.raises(InputError, match="integers from 0 to 3, for 4 experts"):
        Gate(name, 4).route(logits_of(2, 4), ALONE, extra)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ((0, 8), "width=0"),
        ((8, -1), "hidden=-1"),
        ((8, 2.5), "hidden=2.5"),
        ((8, 8, "topk"), "the gate 'topk'"),
        ((8, 8, Gate("topk", 4), None, math.nan), "bias_rate = nan"),
        ((8, 8, Gate("topk", 4), None, 0.1), "bias_rate = 0.1 under the gate topk, which has no"),
        ((8, 8, Gate("gshard", 4), None, 1e-3, 1.5), "seed=1.5"),
        ((8, 8, Gate("gshard", 4), None, 1e-3, -1), "seed=-1"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(arguments: tuple[object, ...], given: str):
    """Widths, gate, bias rate and seed of a layer are checked when it is made."""
    more = arguments if len(arguments) > 2 else (*arguments, Gate("topk", 4))
    with pytest.raises(InputError) as error:
        MoE(*more)  # type: ignore[arg-type]
    assert given in str(error.value)
