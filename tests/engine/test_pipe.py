"""sw.Pipe in a plain loop; pipelines of models that look at numbers, and of transformers."""

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RankError
from tests.engine.cases import settled
from tests.pool import run_gloo, run_threads

SCHEDULES = ["gpipe", "1f1b", "dapple", "zb-h1"]
LOOPED = ["interleaved", "bfs", "zb-v", "dualpipe-v"]


def known_example() -> nn.Module:
    fc1, fc2 = nn.Linear(16, 8).requires_grad_(False), nn.Linear(8, 4)
    return settled(nn.Sequential(fc1, fc2).double())


def deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)]
    return settled(nn.Sequential(*layers).double())


def rows(count: int, seed: int = 0) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(count, 16, generator=own, dtype=torch.float64)


def trained(model: nn.Module, steps: int = 3, count: int = 16) -> dict[str, Any]:
    """A plain loop: its losses, its last output, this rank's last gradients and weights."""
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    out = torch.empty(0)
    for step in range(steps):
        optim.zero_grad()
        for half in range(2):  # gradients add up over calls
            out = model(rows(count, 2 * step + half))
            loss = out.square().mean()
            loss.backward()
            losses.append(loss.item())
        optim.step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return {"losses": losses, "out": out.detach(), "grads": grads, "weights": weights}


def piped(world: World, make: Callable[[], nn.Module], count: int = 16, **options: Any) -> Any:
    torch.set_num_threads(1)
    plain = make()
    model = sw.Pipe(plain, world=world, **options)
    assert model is plain
    return trained(model, count=count)


def assert_same(found: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Losses and output on every rank; each parameter on one rank, its gradient and value."""
    names: list[str] = []
    for own in found:
        assert own["losses"] == pytest.approx(whole["losses"], rel=1e-12)
        torch.testing.assert_close(own["out"], whole["out"], rtol=1e-12, atol=1e-12)
        names += own["weights"]
        for kind in ("grads", "weights"):
            for name, value in own[kind].items():
                torch.testing.assert_close(value, whole[kind][name], rtol=1e-10, atol=1e-12)
    assert sorted(names) == sorted(whole["weights"])


PIPED: list[tuple[Any, int, dict[str, Any]]] = [
    # the well-known example: two linear layers in 8 chunks, of which the first one is frozen
    *((known_example, n, {"chunks": 8, "schedule": "gpipe"}) for n in (2, 1)),
    *((deep, 2, {"chunks": 8, "schedule": word}) for word in (*SCHEDULES, *LOOPED)),
    # rows that chunks do not divide, one chunk, one row a chunk
    *((deep, n, {"chunks": m, "count": rows}) for n, m, rows in ((4, 5, 13), (3, 1, 2), (2, 3, 3))),
]


@pytest.mark.cases(6)
@pytest.mark.parametrize(("make", "ranks", "options"), PIPED)
def test_a_pipe_trains_as_the_plain_module(make: Any, ranks: int, options: dict[str, Any]):
    """Losses, outputs, gradients and weights of the plain loop under every synchronous schedule."""
    found = run_threads(ranks, lambda w: piped(w, make, **options))
    assert_same(found, trained(make(), count=options.get("count", 16)))


@dataclass
class Found:
    """An output that torch's pytree does not take apart."""

    out: Tensor
    more: SimpleNamespace


class Skips(nn.Module):
    """A forward of one's own: two inputs, the first used again at the end, two outputs in objects,
    and one weight in its first and last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight = self.embed.weight
        parametrizations.weight_norm(self.body)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 2.0) -> Found:
        hidden = torch.tanh(self.embed(x)) * mask
        out = self.head(torch.tanh(self.body(hidden)) + x) * scale
        return Found(out, SimpleNamespace(places=mask.argmax(-1)))


def skipping(model: nn.Module) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Output, integer output, and the gradients of what stands before the pipe and of its own."""
    before = settled(nn.Linear(16, 16).double())
    mask = functional.one_hot(torch.arange(9) % 16, 16).double()
    found = model(before(rows(9)), mask=mask, scale=3.0)
    (found.out * rows(9, 1)).sum().backward()
    assert not found.more.places.requires_grad
    grads = [p.grad for p in [before.weight, *dict(model.named_parameters()).values()]]
    return found.out.detach(), found.more.places, grads


def test_a_forward_of_ones_own():
    """Skips, keywords, objects, integers, a layer before the pipe and a weight on two ranks."""
    out, places, (first, *whole) = skipping(settled(Skips().double()))
    names = [name for name, _ in Skips().named_parameters()]

    def on_rank(world: World) -> Any:
        model = sw.Pipe(settled(Skips().double()), 4, ["body", "head"], world=world)
        held = {"embed.weight", "embed.bias"}, {"body.bias"}, {"head.weight"}
        own = [name for name, _ in model.named_parameters()]
        assert held[world.rank] <= {*own}
        return skipping(model), own

    for (found, where, (before, *grads)), own in run_threads(3, on_rank):
        torch.testing.assert_close(found, out)
        assert torch.equal(where, places)
        torch.testing.assert_close(before, first)
        for name, grad in zip(own, grads, strict=True):
            known = name.replace("head.weight", "embed.weight")
            torch.testing.assert_close(grad, whole[names.index(known)])


def cached(world: World) -> Tensor:
    with parametrize.cached():  # has one value for a module and its copies, and for all threads
        return skipping(sw.Pipe(settled(Skips().double()), 4, ["body"], world=world))[0]


def test_a_parametrization_that_a_program_caches():
    """A pass of a pipe computes its own value, and leaves the one that is cached."""
    for found in run_gloo(2, cached):
        torch.testing.assert_close(found, skipping(settled(Skips().double()))[0])


class Padded(nn.Module):
    """In evaluations, nn.TransformerEncoder looks at the padding, to compute without it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Linear(4, 16), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequences = self.embed(x.view(-1, 4, 4))
        padding = (torch.arange(4) == 3).expand(len(sequences), 4)
        return self.encoder(sequences, src_key_padding_mask=padding)[:, :3]


def test_norms_evaluation_and_what_is_left():
    """The norm is that of all stages; nothing stays of inference and of a backward pass."""

    def on_rank(world: World) -> tuple[float, int]:
        model = sw.Pipe(deep(), world=world)
        encoder = sw.Pipe(settled(Padded().double()), world=world).eval()
        with torch.inference_mode():
            out = model.eval()(rows(16))
            padded = encoder(rows(16))
        assert not out.requires_grad and not model.training
        torch.testing.assert_close(out, deep()(rows(16)))
        torch.testing.assert_close(padded, settled(Padded().double()).eval()(rows(16)))
        model.train()(
            rows(16)
        ).square().mean().backward()  # torch keeps the frames of its first imports
        norm = float(sw.clip_grad_norm(model, 1e9))
        gc.collect()
        left: list[Any] = []
        for step in range(2):
            out = model(rows(16))
            left.append(weakref.ref(out.grad_fn))
            if step:
                out.sum().backward()
            del out
        return norm, sum(one() is not None for one in left)

    plain = deep()
    plain(rows(16)).square().mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    gc.disable()
    try:
        assert run_threads(2, on_rank) == [(pytest.approx(wanted, rel=1e-12), 0)] * 2
    finally:
        gc.enable()


def twice(model: nn.Module) -> None:
    out = model(rows(8)).sum()
    out.backward(retain_graph=True)
    out.backward()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(16, 6), nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.ones(len(x), dtype=torch.int64)
        return self.rnn(PackedSequence(self.embed(x), lengths))[0].data


def pipe(model: Any, chunks: int = 8, world: World | None = None, **options: Any) -> nn.Module:
    return sw.Pipe(model, chunks, world=world or alone(), **options)


WRAPPED = "a Sequential that is wrapped already"
NO_LAYER = "without a layer in it"
NO_ROWS = r"a share of no rows for 8 microbatches.*on every data rank\. Write instead: a batch of 8"
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: pipe(known_example(), 10**9), r"chunks=1000000000\. Allowed: .*1 to 32768"),
    *((lambda m=m: pipe(m), NO_LAYER) for m in (nn.Sequential(), nn.ReLU(), nn.Linear(2, 2))),
    (lambda: pipe(nn.Sequential(pipe(known_example()))), WRAPPED),
    (lambda: pipe("m"), r"sw\.Pipe\(nn\.Sequential\(nn"),
    (lambda: pipe(known_example())("text"), NO_ROWS),
    (lambda: pipe(known_example(), schedule="pipedream"), "pipedream, which updates by itself"),
    (lambda: pipe(known_example())(rows(7)), r"a share of 7 rows for 8 microbatches"),
    (
        lambda: pipe(nn.Sequential(known_example(), Mean()))(rows(16)),
        r"an output of shape \[\] of a pipe.*sw\.parallelize",
    ),
    (lambda: pipe(Packs().double())(rows(16)), "a PackedSequence that rnn takes or returns"),
    (lambda: twice(pipe(known_example())), "a second backward pass"),
    (
        lambda: pipe(known_example(), 2)(rows(4), rows(3)),
        r"of shape \[4, 16\].* of shape \[3, 16\] under sw\.Pipe\(module, chunks=2\)",
    ),
]


@pytest.mark.cases(20)
@pytest.mark.parametrize(("call", "said"), BAD)
def test_bad_input_is_answered_before_anything_changes(call: Callable[[], Any], said: str):
    """In a world of one as on several ranks: with what is allowed, and a remedy that is one."""
    with pytest.raises(InputError, match=said) as error:
        call()
    assert not re.search(r"Write instead: ?\.|: ?\. ", str(error.value))


RARE = 3  # a token of two of the four microbatches


class Looks(nn.Module):
    """Blocks, and between them code that depends on tokens in the way `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)  # a forward changes its buffers
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block(x).tanh() + x, tokens)
        return self.head(self.norm(x.mT).mT)

    def between(self, i: int, x: Tensor, tokens: Tensor) -> Tensor:
        match self.how:
            case "a branch with other operations" if (tokens == RARE).any():
                x = torch.cat([x, x[:, :1]], 1)[:, :-1] if i % 2 else x.relu() + x
            case "item":
                x = x * (1 + tokens.max().item() / 100)
            case "tolist":
                x = x * len(set(tokens.flatten().tolist())) / 10
            case "a mask written to":
                x = x.clone()
                x[tokens == RARE] = 0
            case "nonzero":
                x = x + x[:, (tokens != RARE).all(0).nonzero()[:1, 0]]
            case "another length" if i == 1:
                x = x[:, : int((tokens != RARE).sum(1).max()) - 1]
            case "a guard of activations" if torch.isnan(x).any():
                x = torch.nan_to_num(x)
            case "a branch on activations":
                x = x * 2 if x.abs().max() < 50 else x
            case "activations that differ":
                x = x / x.abs().max().item()
        return x


HOWS = (
    *("another length", "a mask in the loss", "a branch with other operations", "item"),
    *("a guard of activations", "tolist", "a mask written to", "nonzero"),
    "a branch on activations",
)


def tokens() -> Tensor:
    found = torch.randint(0, 11, (8, 7), generator=torch.Generator().manual_seed(5))
    found[found == RARE] = RARE + 1
    found[2, 5] = found[7, 0] = RARE
    return found


def masked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    target = batch[:, : out.shape[1]]
    if model.how == "a mask in the loss":
        kept = target != RARE
        return functional.cross_entropy(out[kept], target[kept])
    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


def engine_losses(world: World, how: str, plan: str) -> list[float]:
    torch.set_num_threads(1)
    engine = sw.parallelize(
        settled(Looks(how)), plan, world, optimizer=sw.SGD(lr=0.1), loss=masked_loss
    )
    losses = [engine.step(tokens()).loss for _ in range(2)]
    return [*losses, engine.evaluate(tokens())[0]]


@pytest.mark.cases(5)
@pytest.mark.parametrize("plan", ["pp2 1f1b:4 fp64", "pp2 interleaved:4x2 fp64"])
@pytest.mark.parametrize("how", HOWS)
def test_a_forward_that_reads_numbers(how: str, plan: str):
    """Each microbatch of one shape runs what it runs in one process, also if its tokens differ.
    What is read of activations is the same in all of them.
    """
    expected = pytest.approx(engine_losses(alone(), how, "accumulate:4 fp64"), rel=1e-10)
    for found in run_threads(2, engine_losses, how, plan):
        assert found == expected


@pytest.mark.parametrize(
    ("how", "plan", "said"),
    [
        (
            "activations that differ",
            "pp2 1f1b:4",
            r"item of an activation in test_pipe\.py:\d+, which gives .*, and gave ",
        ),
        (  # data ranks that gather weights together cannot run ahead for one
            "a guard of activations",
            "dp2 pp2 zero3 1f1b:4 fp64",
            r"__bool__ of a tensor that comes from any after blocks\.0, in test_pipe\.py:",
        ),
    ],
)
def test_numbers_that_cannot_be_read(how: str, plan: str, said: str):
    """A number that another microbatch or rank has not is refused, with the line."""
    with pytest.raises(RankError, match=said):
        run_threads(4 if "dp2" in plan else 2, engine_losses, how, plan)
