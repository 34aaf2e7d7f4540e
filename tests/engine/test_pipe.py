"""sw.Pipe: a plain loop on a plain module, whose layers are on several ranks."""

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm import world as worlds
from shardwise.comm.world import World, alone, traced
from shardwise.core.errors import InputError
from tests.engine.cases import settled
from tests.pool import run_gloo, run_threads

SCHEDULES = ["gpipe", "1f1b", "dapple", "zb-h1"]
LOOPED = ["interleaved", "bfs", "zb-v", "dualpipe-v"]


def known_example() -> nn.Module:
    fc1, fc2 = nn.Linear(16, 8), nn.Linear(8, 4)
    return settled(nn.Sequential(fc1, fc2).double())


def deep() -> nn.Module:
    """Eight layers, norms and activations between them."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)]
    return settled(nn.Sequential(*layers).double())


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

    def forward(self, x: Tensor, mask: Tensor, scale: float = 2.0) -> Found:
        hidden = torch.tanh(self.embed(x)) * mask
        out = self.head(torch.tanh(self.body(hidden)) + x) * scale
        return Found(out, SimpleNamespace(places=mask.argmax(-1)))


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
    # the well-known example: two linear layers in 8 chunks
    *((known_example, n, {"chunks": 8, "schedule": word}) for n in (1, 2) for word in SCHEDULES),
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


def norms(world: World) -> float:
    model = sw.Pipe(deep(), world=world)
    model(rows(16, 0)).square().mean().backward()
    return float(sw.clip_grad_norm(model, 1e9))


def test_the_norm_of_a_pipe_is_that_of_all_stages():
    """Every rank would clip by the norm of its own stages."""
    plain = deep()
    plain(rows(16, 0)).square().mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert run_threads(2, norms) == pytest.approx([wanted, wanted], rel=1e-12)


def gloo(world: World) -> Any:
    return piped(world, known_example)


def test_between_processes():
    """The example between processes."""
    assert_same(run_gloo(2, gloo), trained(known_example()))


def page(world: World) -> list[tuple[str, list[int]]]:
    """The example of docs/how-to/one-technique.md as it stands; this rank's trained parameters."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "one-technique.md").read_text(
        encoding="utf-8"
    )
    code = text.partition("## A pipeline")[2].partition("```python")[2].partition("```")[0]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "init", lambda: world)
        exec(code, names)  # noqa: S102 - our own page
    assert names["out"].shape == (16, 4)
    model = names["model"]
    return [(n, list(p.shape)) for n, p in model.named_parameters() if p.grad is not None]


def test_the_page():
    """The page's example runs alone and on two ranks, of which each has one layer."""
    first = [("0.weight", [8, 16]), ("0.bias", [8])]
    second = [("1.weight", [4, 8]), ("1.bias", [4])]
    assert run_threads(1, page) == [first + second]
    assert run_gloo(2, page) == [first, second]


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
        held = {"embed.weight", "embed.bias"}, {"body.weight", "body.bias"}, {"head.weight"}
        own = {name for name, _ in model.named_parameters()}
        assert held[world.rank] <= own
        return skipping(model), list(own and dict(model.named_parameters()))

    for (found, where, (before, *grads)), own in run_threads(3, on_rank):
        torch.testing.assert_close(found, out)
        assert torch.equal(where, places)
        torch.testing.assert_close(before, first)
        for name, grad in zip(own, grads, strict=True):
            known = name.replace("head.weight", "embed.weight")
            torch.testing.assert_close(grad, whole[names.index(known)])


def test_without_gradients():
    """In eval mode and without gradients it gives the same, saves nothing, and hangs on nothing."""

    def on_rank(world: World) -> bool:
        model = sw.Pipe(known_example(), world=world).eval()
        with torch.no_grad():
            out = model(rows(16))
        torch.testing.assert_close(out, known_example()(rows(16)))
        return out.requires_grad or model.training

    assert run_threads(2, on_rank) == [False, False]


def test_nothing_is_left():
    """What a call has saved is gone with its output, whether backward came or not."""

    def on_rank(world: World) -> int:
        model = sw.Pipe(deep(), world=world)
        model(rows(16)).sum().backward()  # torch keeps the frames of its first imports
        gc.collect()
        left: list[Any] = []
        for step in range(2):
            out = model(rows(16))
            left.append(weakref.ref(out.grad_fn))
            if step:
                out.sum().backward()
            del out
        return sum(one() is not None for one in left)

    gc.disable()
    try:
        assert run_threads(2, on_rank) == [0, 0]
    finally:
        gc.enable()


def twice(model: nn.Module) -> None:
    out = model(rows(8)).sum()
    out.backward(retain_graph=True)
    out.backward()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


BAD: dict[str, tuple[Callable[[World], Any], str]] = {
    "a start for one stage": (
        lambda w: sw.Pipe(known_example(), 2, ["nope"], world=w),
        r"1 starts \(nope\) for 1 stage\. .*Write instead: stages=None",
    ),
    "chunks without end": (
        lambda w: sw.Pipe(known_example(), 10**9, world=w),
        r"chunks=1000000000\. Allowed: a whole number from 1 to 32768",
    ),
    "no layers": (
        lambda w: sw.Pipe(nn.Module(), world=w),
        "stage 0, from the first module on, without a layer",
    ),
    "an empty list": (lambda w: sw.Pipe(nn.Sequential(), world=w), "without a layer in it"),
    "no parameters": (lambda w: sw.Pipe(nn.ReLU(), world=w), "without a layer in it"),
    "one layer alone": (lambda w: sw.Pipe(nn.Linear(2, 2), world=w), "without a layer in it"),
    "a pipe": (
        lambda w: sw.Pipe(sw.Pipe(known_example(), world=w), world=w),
        "a Sequential that is wrapped already",
    ),
    "part of a pipe": (
        lambda w: sw.Pipe(nn.Sequential(sw.Pipe(known_example(), world=w)), world=w),
        "a Sequential that is wrapped already",
    ),
    "what is sharded": (
        lambda w: sw.Pipe(sw.FSDP(known_example(), world=w), world=w),
        "a Sequential that is wrapped already",
    ),
    "a text": (lambda w: sw.Pipe("m", world=w), r"sw\.Pipe\(nn\.Sequential\(nn"),  # type: ignore[arg-type]
    "a call with a text": (
        lambda w: sw.Pipe(known_example(), world=w)("text"),
        r"a batch of no rows for a pipe of 8 chunks.*Write instead: a batch of 8 rows or more\.$",
    ),
    "a call with nothing": (
        lambda w: sw.Pipe(known_example(), world=w)(),
        r"a batch of no rows for a pipe of 8 chunks.*Write instead: a batch of 8 rows or more\.$",
    ),
    "too many stages": (
        lambda _: sw.Pipe(known_example(), world=traced(0, 3)),
        r"3 stages for a Sequential of 2 layers.*pp2",
    ),
    "a schedule that updates": (
        lambda w: sw.Pipe(known_example(), schedule="pipedream", world=w),
        "pipedream, which updates by itself",
    ),
    "no schedule": (
        lambda w: sw.Pipe(known_example(), schedule="gpip", world=w),
        r"the schedule 'gpip'.*gpipe",
    ),
    "too few rows": (
        lambda w: sw.Pipe(known_example(), 8, world=w)(rows(7)),
        r"a batch of 7 rows for a pipe of 8 chunks.*8 rows or more",
    ),
    "a number for an output": (
        lambda w: sw.Pipe(nn.Sequential(known_example(), Mean()), 8, world=w)(rows(16)),
        r"an output of shape \[\] of a pipe.*sw\.parallelize",
    ),
    "two backward passes": (
        lambda w: twice(sw.Pipe(known_example(), 8, world=w)),
        "a second backward pass",
    ),
    "rows that differ": (
        lambda w: sw.Pipe(known_example(), 2, world=w)(rows(4), rows(3)),
        r"of shape \[4, 16\].* of shape \[3, 16\] under sw\.Pipe\(module, chunks=2\)",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_answered_before_anything_changes(what: str):
    """In a world of one as on several ranks: with what is allowed, and a remedy that is one."""
    call, said = BAD[what]
    with pytest.raises(InputError, match=said) as error:
        call(alone())
    assert not re.search(r"Write instead: ?\.|: ?\. ", str(error.value))
