"""`sw.DataParallel` on several devices of one process computes what the plain module does."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.core.errors import InputError
from tests.engine.cases import difference, settled
from tests.engine.zoo import OUTPUTS, ZOO, Block, Output, make

F64 = torch.float64
#: Without the model whose hook closes over the module itself: see the page.
MODELS = [name for name in ZOO if name not in ("weight by a hook", "returns an object", "dropout")]


class Referring(nn.Module):
    """A module that calls its parts through a list, a dict, and a bound method; with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.inside = [self.a, {"b": self.b}]
        self.scale = torch.full((6,), 2.0, dtype=F64)  # neither parameter nor buffer
        self.step = self.apply_all

    def apply_all(self, x: Tensor) -> Tensor:
        y = self.inside[1]["b"](self.inside[0](x)) * self.scale
        return self.c(y.unsqueeze(1))[0][:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


def model_of(name: str) -> nn.Module:
    return (settled(Referring()) if name == "references" else make(name)).double()


def on(count: int, module: Any) -> nn.Module:
    return sw.DataParallel(module, devices=["cpu"] * count)


def rows_of(step: int, count: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    return torch.randn(count, 6, generator=own, dtype=F64)


def trained(model: nn.Module, name: str, rows: int) -> list[Tensor]:
    """Three updates; the outputs and gradients of each step, and the weights at the end."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    seen: list[Tensor] = []
    how = name.removeprefix("returns a ")
    for step in range(3):
        out = model(rows_of(step, rows).requires_grad_())
        out = OUTPUTS[how][1](out) if how in OUTPUTS else out
        out.square().mean().backward()
        seen.append(out.detach())
        seen += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
        optim.step()
        optim.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", [*MODELS, "references"])
def test_outputs_gradients_and_updates_are_the_plain_modules(name: str, devices: int) -> None:
    """Seven rows on one, two or four devices: all of three steps to 1e-10."""
    plain = trained(model_of(name), name, 7)
    found = trained(on(devices, model_of(name)), name, 7)
    assert all(difference(a, b) <= 1e-10 for a, b in zip(found, plain, strict=True))


class Weighted(nn.Module):
    """Takes rows in a dict and a number, and gives an object, a loss and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double()

    def forward(self, batch: dict[str, Any], *, power: int) -> dict[str, Any]:
        out = self.inner(batch["rows"][0]) ** power * batch["scale"]
        return {"out": Output(out), "loss": out.sum(), "power": power}


def test_inputs_are_differentiable_and_may_be_nested() -> None:
    """The gradient of an input in a dict is the plain module's; a number goes to all devices."""
    model, seen = settled(Weighted()), list[list[Tensor]]()
    for each in (model, on(2, model)):
        x, scale = rows_of(0, 5).requires_grad_(), torch.tensor(3.0).double().requires_grad_()
        found = each({"rows": (x, "text"), "scale": scale}, power=3)
        assert found["power"] == 3
        found["out"].value.square().sum().backward()
        assert x.grad is not None
        assert scale.grad is not None
        seen.append([found["out"].value.detach(), found["loss"].detach().sum(), x.grad, scale.grad])
    assert all(difference(a, b) <= 1e-10 for a, b in zip(*seen, strict=True))


def test_batch_norm_keeps_the_statistics_of_replica_0() -> None:
    """Outputs are those of the module on each part; statistics those after the first part."""
    model, x = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double(), rows_of(0, 7)
    plain = copy.deepcopy(model)
    parts = [copy.deepcopy(plain)(part) for part in x.tensor_split(2)]
    wrapped = on(2, model)
    assert difference(wrapped(x).detach(), torch.cat(parts).detach()) <= 1e-10
    plain(x.tensor_split(2)[0])
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert difference(mine, other) <= 1e-10
    assert difference(wrapped.eval()(x).detach(), plain.eval()(x).detach()) <= 1e-10


def test_dropout_uses_one_mask_for_an_output_and_its_gradient() -> None:
    """Masks differ from replica to replica; a gradient is zero just where its output is."""
    wrapped, x = on(2, nn.Dropout(0.5)), torch.ones(64, 16, requires_grad=True)
    out = wrapped(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert not torch.equal(out[:32], out[32:])
    assert torch.equal(wrapped.eval()(x), x)


class Changing(nn.Module):
    """Counts its calls, and doubles its weight in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.weight = 0, nn.Parameter(torch.ones(6).double())

    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise KeyError("negative")
        self.calls += 1
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


def test_a_module_that_changes_itself_keeps_what_replica_0_did() -> None:
    """No copy's change reaches the module; an error keeps its class, and names its replica."""
    module = Changing()
    out = on(3, module)(torch.ones(3, 6).double())
    assert module.calls == 1
    assert torch.equal(module.weight.detach(), torch.full((6,), 2.0).double())
    assert out.detach().unique().tolist() == [2.0]
    with pytest.raises(KeyError, match="negative") as caught:
        on(3, Changing())(torch.tensor([[1.0] * 6, [-1.0] * 6, [-1.0] * 6]))
    assert caught.value.__notes__ == ["in replica 1 of 3, on cpu"]


def test_state_dicts_have_the_plain_modules_keys() -> None:
    """Saved and loaded with and without the wrapper, alone and inside another module."""
    plain, wrapped, inner = make("stack"), on(2, make("stack")), on(2, make("stack"))
    outer = nn.ModuleDict({"part": inner})
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    changed = {key: value + 1 for key, value in plain.state_dict().items()}
    wrapped.load_state_dict(changed)
    outer.load_state_dict({f"part.{key}": value for key, value in changed.items()})
    for found in (wrapped, sw.unwrap(wrapped), sw.unwrap(inner)):
        assert all(torch.equal(value, changed[key]) for key, value in found.state_dict().items())


def joined(*outputs: Any) -> Any:
    return sw.replicas.gather([*outputs], "cpu")


ONE = torch.ones(1)
REFUSED: dict[str, Any] = {
    "cuda:99": lambda: sw.DataParallel(Block(), ["cuda:99", "cuda:98"]),
    "the device 'gpu'": lambda: sw.DataParallel(Block(), ["gpu"]),
    "the device meta": lambda: sw.DataParallel(Block(), ["meta", "meta"]),
    "a list with one device": lambda: sw.DataParallel(Block(), "cpu"),
    r"devices=\[\]": lambda: on(0, Block()),
    "1 rows for 2 devices": lambda: on(2, Block())(torch.ones(1, 6)),
    r"\(4, 6\) and \(1, 6\)": lambda: on(2, nn.Bilinear(6, 6, 2))(
        torch.ones(4, 6), torch.ones(1, 6)
    ),
    "without a tensor": lambda: on(2, Block())(3),
    "DataParallel.*sw.unwrap": lambda: on(2, on(2, Block())),
    "wrapped already.*sw.unwrap": lambda: on(2, sw.DDP(Block())),
    "sw.unwrap": lambda: sw.DDP(on(2, Block())),
    "an nn.Module instance": lambda: on(2, 3),
    "max_norm": lambda: on(2, nn.Embedding(3, 2, max_norm=1.0)),
    "on meta": lambda: sw.replicas.replicate(Block().to("meta"), ["cpu", "cpu"]),
    "1 modules, 2 inputs": lambda: sw.replicas.parallel_apply([Block()], [1, 2]),
    "'b'": lambda: joined({"a": ONE}, {"b": ONE}),
    "output 1": lambda: joined(*(dict.fromkeys(names, ONE) for names in ("ab", "ba"))),
    "no outputs": joined,
}


@pytest.mark.cases(len(REFUSED))
@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused(said: str) -> None:
    """Each is one paragraph with what to write instead."""
    with pytest.raises(InputError, match=said) as caught:
        REFUSED[said]()
    assert "Write instead:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_threads_have_the_callers_state() -> None:
    """No gradients under no_grad and inference_mode; autocast's dtype under autocast."""
    model, x = on(2, nn.Linear(6, 6)), torch.ones(4, 6)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x).requires_grad


def test_the_four_operations_compose_by_hand() -> None:
    """scatter, replicate, parallel_apply, gather; after the backward pass no copy is alive."""
    module, x, devices = settled(Block()), rows_of(0, 7).float(), ["cpu"] * 3
    parts = sw.replicas.scatter(x, devices)
    assert [len(part) for part in parts] == [3, 2, 2]
    replicas = sw.replicas.replicate(module, devices)
    assert replicas[0] is module
    assert type(replicas[1]) is Block
    assert not replicas[1].up.weight.is_leaf
    out = joined(*sw.replicas.parallel_apply(replicas, parts))
    assert torch.allclose(out, module(x), atol=1e-6)
    assert joined(ONE[0], 2 * ONE[0]).tolist() == [1.0, 2.0]
    copies = [weakref.ref(p) for p in replicas[1].parameters()]
    out.sum().backward()
    del replicas, out
    gc.collect()
    assert [ref() for ref in copies] == [None] * len(copies)
