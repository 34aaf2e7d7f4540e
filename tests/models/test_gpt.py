import dataclasses
import math

import pytest
import torch
from torch import Tensor

from shardwise.models import gpt
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.initial import fill, initial

MICRO = GPTConfig(vocabulary=23, layers=2, width=16, heads=4, kv_heads=2, hidden=24, sequence=6)
PLAIN = dataclasses.replace(MICRO, kv_heads=4)
TIED = dataclasses.replace(MICRO, tied=True)


def made(config: GPTConfig, seed: int = 0) -> GPT:
    model = GPT(config)
    fill(model, seed)
    return model.double()


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


@pytest.mark.parametrize("config", [PLAIN, MICRO, TIED], ids=["plain", "grouped", "tied"])
def test_loss_and_gradients_are_those_of_the_model_written_out(config: GPTConfig) -> None:
    """Loss and every gradient equal those of a model written position by position, in fp64."""
    model = made(config)
    batch = gpt.random_text(2, config.sequence, config.vocabulary, seed=1)
    batch["targets"][0, 4:] = -100
    gpt.loss(model, batch).backward()

    names = dict(model.named_parameters(remove_duplicate=False))
    leaves = {id(p): p.detach().clone().requires_grad_() for p in names.values()}
    copies = {name: leaves[id(p)] for name, p in names.items()}
    expected = reference_loss(copies, config, batch)
    expected.backward()
    torch.testing.assert_close(gpt.loss(model, batch), expected, rtol=1e-12, atol=0)
    for name, p in names.items():
        torch.testing.assert_close(p.grad, copies[name].grad, rtol=1e-10, atol=1e-13)


def test_no_position_sees_a_later_one() -> None:
    """Changing a token leaves the logits of all earlier positions as they were."""
    model = made(MICRO)
    tokens = gpt.random_text(1, MICRO.sequence, MICRO.vocabulary, seed=2)["inputs"]
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % MICRO.vocabulary
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :3], after[0, :3], rtol=0, atol=0)
    assert not torch.allclose(before[0, 3], after[0, 3])


def test_the_loss_is_the_mean_over_the_targets_that_count() -> None:
    """Two parts of a batch, weighed by their tokens, have the loss of the whole."""
    model = made(MICRO)
    batch = gpt.random_text(4, MICRO.sequence, MICRO.vocabulary, seed=3)
    batch["targets"][0, 1:] = -100
    parts = [{k: v[rows] for k, v in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    assert [gpt.tokens(part) for part in parts] == [1, 18]
    total = torch.stack([gpt.loss(model, part) * gpt.tokens(part) for part in parts]).sum()
    torch.testing.assert_close(total / 19, gpt.loss(model, batch))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    """A model filled block by block, last block first, from meta has the weights of the whole."""
    whole = GPT(MICRO)
    fill(whole, 7)
    with torch.device("meta"):
        piecewise = GPT(MICRO)
    names = {id(module): name for name, module in piecewise.named_modules()}
    for unit in [piecewise.head, piecewise.norm, *reversed(piecewise.blocks), piecewise.embed]:
        unit.to_empty(device="cpu")
        for name, p in unit.named_parameters():
            initial(f"{names[id(unit)]}.{name}", p, 7)
    for name, p in whole.named_parameters():
        assert torch.equal(p, piecewise.get_parameter(name)), name


def test_initial_weights_differ_by_seed_and_by_name() -> None:
    """Another seed or another layer draws other numbers."""
    one, two = made(MICRO, 0), made(MICRO, 1)
    q = [one.blocks[i].get_parameter("attn.q.weight") for i in (0, 1)]
    assert not torch.equal(q[0], q[1])
    assert not torch.equal(q[0], two.blocks[0].get_parameter("attn.q.weight"))


def test_initial_weights_are_the_same_numbers_in_any_precision() -> None:
    """In bf16 a parameter starts as the rounded value it has in fp32."""
    exact, rounded = torch.empty(8, 16), torch.empty(8, 16, dtype=torch.bfloat16)
    for tensor in (exact, rounded):
        initial("blocks.0.attn.q.weight", tensor, 3)
    assert torch.equal(exact.bfloat16(), rounded)


@pytest.mark.parametrize(
    ("size", "numel"), [("tiny", 1_066_112), ("small", 33_300_992), ("quickstart", 3_082_496)]
)
def test_sizes(size: str, numel: int) -> None:
    """Each size has the parameters that its name is known for."""
    assert gpt.parameters(gpt.SIZES[size]) == numel


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_without_a_model(tied: bool) -> None:
    """The arithmetic is that of the model when it is built."""
    for sizes in gpt.SIZES.values():
        given = dataclasses.replace(sizes, tied=tied, kv_heads=2)
        with torch.device("meta"):
            built = gpt.GPT(given)
        assert gpt.parameters(given) == sum(p.numel() for p in built.parameters())


def test_operations_are_counted_by_weight() -> None:
    """Without attention scores, a token costs six operations for each weight that multiplies."""
    short = dataclasses.replace(PLAIN, sequence=1)
    vectors = (2 * PLAIN.layers + 1) * PLAIN.width
    lookup = PLAIN.vocabulary * PLAIN.width
    products = gpt.parameters(short) - vectors - lookup
    assert gpt.flops_per_token(short) == 6 * products + 12 * PLAIN.layers * PLAIN.width
