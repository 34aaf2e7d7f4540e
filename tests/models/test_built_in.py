"""The models that are built in: their losses, gradients, initial weights, sizes and operations."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.models import gpt, moe
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.moe import MoEConfig, MoEGPT
from shardwise.models.pretrained import PUBLISHED
from shardwise.models.registry import find
from shardwise.models.trainable import fill, initial
from shardwise.techniques.expert.gate import GATES, Gate

MICRO = GPTConfig(
    vocabulary=23, layers=2, hidden_size=16, heads=4, kv_heads=2, intermediate_size=24, sequence=6
)
TIED = replace(MICRO, tied=True)


def reference_loss(
    weights: dict[str, Tensor], config: GPTConfig, batch: dict[str, Tensor]
) -> Tensor:
    """The same model by another road: one sequence, one head, one position at a time."""
    totals = [
        reference_row(weights, config, inputs, targets)
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True)
    ]
    return torch.stack(totals).sum() / sum(int((t != -100).sum()) for t in batch["targets"])


def reference_row(
    weights: dict[str, Tensor], config: GPTConfig, inputs: Tensor, targets: Tensor
) -> Tensor:
    x = [weights["embed.weight"][token] for token in inputs]
    for layer in range(config.layers):
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"blocks.{layer}.")}
        normed = [normalised(row, w["attn_norm.weight"]) for row in x]
        x = [a + b for a, b in zip(x, attended(w, config, normed), strict=True)]
        for t, row in enumerate(x):
            h = normalised(row, w["mlp_norm.weight"])
            gate = w["mlp.gate.weight"] @ h
            x[t] = row + w["mlp.down.weight"] @ (
                gate / (1 + torch.exp(-gate)) * (w["mlp.up.weight"] @ h)
            )
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(x, targets, strict=True):
        if target != -100:
            logits = weights["head.weight"] @ normalised(row, weights["norm.weight"])
            total = total + torch.logsumexp(logits, 0) - logits[target]
    return total


def attended(w: dict[str, Tensor], config: GPTConfig, x: list[Tensor]) -> list[Tensor]:
    size, share = config.head_width, config.heads // config.kv_heads
    outs = []
    for t in range(len(x)):
        heads = []
        for head in range(config.heads):
            own, group = slice(head * size, (head + 1) * size), head // share
            kv = slice(group * size, (group + 1) * size)
            q = turned(w["attn.q.weight"][own] @ x[t], t)
            k = [turned(w["attn.k.weight"][kv] @ x[s], s) for s in range(t + 1)]
            score = torch.softmax(torch.stack([q @ row for row in k]) / math.sqrt(size), 0)
            heads.append(sum(score[s] * (w["attn.v.weight"][kv] @ x[s]) for s in range(t + 1)))
        outs.append(w["attn.out.weight"] @ torch.cat(heads))
    return outs


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary positions as complex numbers: pair i times e^(i·position·10000^(-2i/E))."""
    half = len(x) // 2
    angle = position * 10_000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * scale


@pytest.mark.parametrize("config", [MICRO, TIED], ids=["grouped", "tied"])
def test_loss_and_gradients_are_those_of_the_model_written_out(config: GPTConfig) -> None:
    """Loss and every gradient equal those of a model written position by position, in fp64."""
    model = GPT(config)
    fill(model, 0)
    model.double()
    batch = gpt.random_text(2, config.sequence, config.vocabulary, seed=1)
    batch["targets"][0, 4:] = -100
    assert gpt.tokens(batch) == 10
    gpt.loss(model, batch).backward()
    names = dict(model.named_parameters(remove_duplicate=False))
    leaves = {id(p): p.detach().clone().requires_grad_() for p in names.values()}
    copies = {name: leaves[id(p)] for name, p in names.items()}
    expected = reference_loss(copies, config, batch)
    expected.backward()
    torch.testing.assert_close(gpt.loss(model, batch), expected, rtol=1e-12, atol=0)
    for name, p in names.items():
        torch.testing.assert_close(p.grad, copies[name].grad, rtol=1e-10, atol=1e-13)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    """Filled block by block, last block first, from meta they are those of the whole."""
    whole, other = GPT(MICRO), GPT(MICRO)
    fill(whole, 7)
    fill(other, 8)
    with torch.device("meta"):
        piecewise = GPT(MICRO)
    names = {id(module): name for name, module in piecewise.named_modules()}
    for unit in [piecewise.head, piecewise.norm, *reversed(piecewise.blocks), piecewise.embed]:
        unit.to_empty(device="cpu")
        for name, p in unit.named_parameters():
            initial(f"{names[id(unit)]}.{name}", p, 7)
    for name, p in whole.named_parameters():
        assert torch.equal(p, piecewise.get_parameter(name)), name
    first, second = (whole.get_parameter(f"blocks.{i}.attn.q.weight") for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.get_parameter("blocks.0.attn.q.weight"))


def test_initial_weights_are_the_same_numbers_in_any_precision() -> None:
    """In bf16 a parameter starts as the rounded value it has in fp32."""
    exact, rounded = torch.empty(8, 16), torch.empty(8, 16, dtype=torch.bfloat16)
    for tensor in (exact, rounded):
        initial("blocks.0.attn.q.weight", tensor, 3)
    assert torch.equal(exact.bfloat16(), rounded)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_without_a_model(tied: bool) -> None:
    """The arithmetic is that of the model when it is built."""
    for sizes in gpt.SIZES.values():
        given = replace(sizes, tied=tied, kv_heads=2)
        with torch.device("meta"):
            built = GPT(given)
        assert given.parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.cases(len(GATES))
@pytest.mark.parametrize("gate", GATES)
def test_parameters_of_experts_are_counted_without_a_model(gate: str) -> None:
    """With and without experts that every token takes."""
    for shared in (0, 2):
        config = MoEConfig(moe.TINY, Gate(gate, 6, GATES[gate] or 3), shared)
        with torch.device("meta"):
            model = MoEGPT(config)
        assert config.parameters == sum(p.numel() for p in model.parameters())


#: As their model cards on Hugging Face count them.
COUNTS = {
    "gpt:1b": 1_100_048_384,
    "gpt:7b": 6_738_415_616,
    "llama:8b": 8_030_261_248,
    "llama:70b": 70_553_706_496,
    "mixtral:8x7b": 46_702_792_704,
}


@pytest.mark.cases(len(COUNTS))
@pytest.mark.parametrize("name", COUNTS)
def test_a_published_size_has_the_published_number_of_parameters(name: str) -> None:
    """Exactly, by arithmetic and as a model on meta, which has no weights."""
    assert PUBLISHED.keys() == COUNTS.keys()
    params = [*find(name).plain().parameters()]
    assert sum(p.numel() for p in params) == PUBLISHED[name].parameters == COUNTS[name]
    assert all(p.is_meta for p in params)


def test_operations_are_counted_by_weight() -> None:
    """Six for each weight that multiplies, and scores; experts add those of the routers alone."""
    short = replace(MICRO, sequence=1, kv_heads=4)
    vectors = (2 * short.layers + 1) * short.hidden_size
    products = short.parameters - vectors - short.vocabulary * short.hidden_size
    assert short.flops_per_token == 6 * products + 12 * short.layers * short.hidden_size
    few, many = (
        MoEConfig(moe.TINY, Gate("topk", experts, 2)).flops_per_token for experts in (4, 64)
    )
    assert many - few == 6 * moe.TINY.layers * moe.TINY.hidden_size * 60


def test_sizes_after_the_gate() -> None:
    """After the gate come a capacity, the experts and those of a token; an empty one is unset."""
    gates = [moe.tiny(text).gate for text in ("topk", "topk:1.25", "topk::8:3", "switch:2:6")]
    sizes = [(None, 4, 2), (1.25, 4, 2), (None, 8, 3), (2.0, 6, 1)]
    assert [(g.capacity, g.experts, g.k) for g in gates] == sizes


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "tied", "loss"), [("gpt2", True, 4.9), ("llama", False, 4.9), ("t5", True, None)]
)
def test_a_type_that_is_shrunk_keeps_its_ties(name: str, tied: bool, loss: float | None):
    """Embeddings are shared as the type has them; all are small, with a loss of ln V (not t5)."""
    pytest.importorskip("transformers")
    found = find(f"toy:{name}")
    model: Any = found.build()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert sum(p.numel() for p in model.parameters()) < 200_000
    first = found.loss(model, found.make_batch(2, 0)).item()
    assert loss is None or first == pytest.approx(loss, abs=0.3)
