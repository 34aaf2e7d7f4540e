"""Every number that ranks exchange is made on the world's device, in a dtype of its own.

A pretended second device, so that a machine without a GPU finds tensors made on the host:

    host      `cpu`      where torch makes a tensor unless it is given a device
    device    `cpu:0`    the world's: torch accepts it and gives memory of the host

The mode answers `x.device`, raises what CUDA raises where an operation mixes both, and records
calls in which the host waits.  Tensors made outside of it, or by autograd, are on the device.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import World, world_of
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.models import gpt
from shardwise.techniques.data.apply import driver_of
from tests.engine.cases import share, small_gpt, text
from tests.engine.loops import rows, wrap
from tests.engine.zoo import make
from tests.threads import on_threads

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)

#: Their result is a tensor that exists already.
_ACCESS = {Tensor.grad.__get__, Tensor._base.__get__}  # type: ignore[attr-defined]
_WRITES = {Tensor.data.__set__, Tensor.set_}  # type: ignore[attr-defined]
#: The host waits for the values of a tensor of the device.
_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
    *(Tensor.__index__, Tensor.numpy, Tensor.nonzero, torch.nonzero, torch.equal, Tensor.equal),
}
#: They may mix a tensor of the device with one of the host.
_MIXES = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, *_WRITES}


#: The arguments of the functions that run a backward pass, after the first; gradients are last.
_ARGUMENTS = {
    Tensor.backward: ("gradient", "retain_graph", "create_graph", "inputs", "gradient"),
    torch.autograd.backward: ("grad_tensors", "retain_graph", "create_graph", "grad_tensors"),
    torch.autograd.grad: ("inputs", "grad_outputs", "retain_graph", "create_graph", "grad_outputs"),
}


def on_host(x: Tensor) -> bool:
    return getattr(x, "_is_on_host", False) and not x.is_meta


def place(x: Tensor, host: bool) -> None:
    x._is_on_host = host  # type: ignore[attr-defined]


class SecondDevice(TorchFunctionMode):
    """`reads` are the names of functions that waited for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.own: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind.__module__.startswith("shardwise") and func not in self.own:
                return self._by(kind, func, types, args, kwargs)
        if func == Tensor.device.__get__:
            (x,) = args
            real = func(x)
            return real if real.type != "cpu" else HOST if on_host(x) else DEVICE
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._compare(func, tensors)
        if func in _ARGUMENTS:
            return self._backward(func, args[0], args[1:], kwargs)
        if func in (Tensor.to, Tensor.cpu):
            return self._copied(func, args, kwargs)
        if func == Tensor.__reduce_ex__:  # a file has no attribute of the mode
            return func(args[0].detach(), *args[1:])
        out = func(*args, **kwargs)
        if func in _WRITES:
            place(args[0], on_host(args[1]))
        elif func not in _ACCESS:
            self._place(func, out, tensors, kwargs)
        return out

    def _by(self, kind: Any, func: Any, *rest: Any) -> Any:
        """The function of a subclass of Tensor, whose own code runs under the mode."""
        self.own.append(func)
        try:
            with self:
                return kind.__torch_function__(func, *rest)
        finally:
            self.own.pop()

    def _backward(self, func: Any, roots: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own functions call hooks outside of the mode (see techniques/tensor/rng.py)."""
        named = dict(zip(_ARGUMENTS[func], args, strict=False)) | kwargs
        named |= {"grads": named.pop(_ARGUMENTS[func][-1], None)}
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        grads = named["grads"]
        grads = grads if isinstance(grads, (list, tuple)) else (grads,) * len(roots)
        grads = _make_grads(roots, grads, is_grads_batched=False)
        creates, keeps = named.get("create_graph", False), named.get("retain_graph")
        inputs = named.get("inputs") or ()
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        finds = func is torch.autograd.grad
        allowed = {"allow_unreachable": not finds or named.get("allow_unused", False)}
        with self:
            return _engine_run_backward(
                *(roots, grads, creates if keeps is None else keeps, creates, inputs),
                **allowed,
                accumulate_grad=not finds,
            )

    def _compare(self, func: Callable[..., Any], tensors: Iterable[Tensor]) -> None:
        real = [x for x in tensors if not x.is_meta]
        apart = [x for x in real if on_host(x) and x.dim()]
        if apart and func not in _MIXES and not all(map(on_host, real)):
            raise RuntimeError(f"{func.__name__}: tensors on {HOST} and {DEVICE}")
        if func in _READS and not all(map(on_host, real)):
            self.reads.append(func.__name__)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A copy to the device that `to` names; blocking ones wait for the device."""
        x, asked = args[0], [*args[1:], *kwargs.values()]
        devices = [torch.device(a) for a in asked if isinstance(a, (str, torch.device))]
        devices += [DEVICE if not on_host(a) else HOST for a in asked if isinstance(a, Tensor)]
        to = HOST if func is Tensor.cpu else devices[0] if devices else None
        out = func(*args, **kwargs)
        if out.is_meta or to is None:
            place(out, on_host(x))
            return out
        moved = on_host(x) != (to != DEVICE)
        out = out.clone() if moved and out is x else out
        place(out, to != DEVICE)
        if moved and not kwargs.get("non_blocking"):
            self.reads.append(func.__name__)
        return out

    def _place(self, func: Any, out: Any, tensors: list[Tensor], kwargs: Any) -> None:
        """Record where the results are."""
        host = all(map(on_host, tensors))
        if kwargs.get("device") is not None:
            host = torch.device(kwargs["device"]) != DEVICE
            if func is torch.tensor and not host:
                self.reads.append("tensor")  # copied from pageable memory
        elif func in _device_constructors():
            host = True
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not any(x is one for one in tensors):
                place(x, host)


def run_on_device(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(mode, world, *args)` on threads whose world is on the second device."""

    def body(rank: int, links: Any) -> Any:
        with SecondDevice() as mode:
            return function(mode, world_of(rank, ranks, DEVICE, links), *args)

    return on_threads(ranks, body)


PLANS = (
    *("dp2 zero1 fp16", "dp2 zero2 bf16", "dp_replicate2 dp_shard2 zero3", "tp2 dp2 sp zero3"),
    *("pp2 zb-h1:2", "pp2 dp2 zero1 gpipe:2", "pp2 2bw:2", "dp2 zero3 tile:2"),
    "dp2 tp2 | blocks.0: dp4 zero3",
)


def on_device(batch: Any, world: World) -> Any:
    return tree_map(lambda x: x.to(world.device, non_blocking=True), batch)


def looped(mode: SecondDevice, world: World, how: str) -> list[list[str]]:
    """A loop that clips, evaluates, and takes the state; the reads in each step."""
    model = wrap(how, make("stack").double(), world)
    optim, reads = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False), []
    for step in range(3):
        mode.reads.clear()
        x = on_device(rows(step, 0 if how == "Pipe" else world.rank), world)
        model(x).square().mean().backward()
        reads.append(list(mode.reads))
        with nullcontext() if how == "Pipe" else sw.no_sync(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        sw.clip_grad_norm(model, 1.0)
        optim.step()
        optim.zero_grad()
    with torch.no_grad():
        model.eval()(x)
    sw.full_state_dict(model)
    sw.unwrap(model)(x)
    return reads


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not on the host when their sum has been begun, as on a GPU."""
    monkeypatch.setattr(HostNumbers, "ready", False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "Pipe"])
def test_a_plain_loop_sends_tensors_of_its_device(how: str) -> None:
    """Of a backward pass it is read where the next one begins; a pipe reads its first batch."""
    ranks = 4 if "HYBRID" in how else 2
    reads = [["tolist"], [], []] if how == "Pipe" else [[], ["tolist"], ["tolist"]]
    assert run_on_device(ranks, looped, how) == [reads] * ranks


def differs(mode: SecondDevice, world: World, what: str) -> None:
    """Rank 1 is a step ahead, and does `what` next."""
    model = sw.FSDP(make("stack").double(), world=world)
    driver = driver_of(model)
    assert driver is not None
    driver.consensus.rounds += world.rank
    x = on_device(rows(0, world.rank), world)
    model(x).square().mean().backward()
    acts: dict[str, Callable[[], Any]] = {
        "train": lambda: model(x).sum().backward(),
        "state_dict": model.state_dict,
        "full_state_dict": lambda: sw.full_state_dict(model),
        "unwrap": lambda: sw.unwrap(model),
        "evaluate": lambda: torch.no_grad()(model)(x),
    }
    with pytest.raises(InputError, match="in which data ranks differ"):
        acts[what]()


@pytest.mark.cases(5)
@pytest.mark.parametrize("what", ["train", "state_dict", "full_state_dict", "unwrap", "evaluate"])
@pytest.mark.usefixtures("late")
def test_ranks_that_differ_are_found_before_weights_are_used(what: str) -> None:
    """Where a device would have to be waited for, at the next use of the weights."""
    run_on_device(2, differs, what)


def skips(mode: SecondDevice, world: World) -> list[bool]:
    """Rank 1 uses one of two layers; whether each has a gradient."""
    both: Any = sw.DDP(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), world)
    both.forward = lambda x: sum(layer(x).sum() for layer in list(both)[: 2 - world.rank])
    both(on_device(torch.ones(2, 3), world)).backward()
    return [layer.weight.grad is not None for layer in both]


@pytest.mark.usefixtures("late")
def test_a_parameter_that_another_rank_uses_has_a_gradient_at_once() -> None:
    """A rank without a gradient waits for the others', so that all update the same."""
    assert run_on_device(2, skips) == [[True, True, False]] * 2


def stepped(mode: SecondDevice, world: World, plan: str, folder: str) -> list[list[str]]:
    """Steps, evaluation, the state, and a checkpoint; the reads of each step."""
    optimizer, clip = sw.AdamW(lr=0.01, foreach=False), None if "2bw" in plan else 1.0
    engine = sw.parallelize(small_gpt(), plan, world, optimizer=optimizer, loss=gpt.loss, clip=clip)
    reads = []
    for step in range(3):
        mode.reads.clear()
        batch = share(text(step, 8), engine.data_rank, engine.data_ranks)
        engine.step(on_device(batch, world))
        reads.append(list(mode.reads))
    engine.evaluate(on_device(batch, world))
    sw.full_state_dict(engine)
    sw.save(engine, folder)
    sw.load(engine, folder)
    return reads


@pytest.mark.parametrize("plan", PLANS)
def test_an_engine_sends_tensors_of_its_device(plan: str, tmp_path: Path) -> None:
    """Under every technique, in all that ranks tell each other; one read in a step."""
    for reads in run_on_device(Plan.parse(plan).size, stepped, plan, str(tmp_path)):
        # the others look at tokens, and at each update
        if not any(word in plan for word in ("tp", "tile", "2bw")):
            assert reads[1:] == [["tolist"]] * 2
