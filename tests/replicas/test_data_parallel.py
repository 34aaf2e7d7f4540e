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
from tests.engine.zoo import ZOO, Block, Output, make, unwrapped

#: Without the model whose hook closes over the module itself: see the page.
MODELS = [name for name in ZOO if name not in ("weight by a hook", "returns an object")]
OUTPUTS = ("dataclass", "dict", "tuple")


class Recurrent(nn.Module):
    """An LSTM, which keeps its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.unsqueeze(1))[0][:, 0])


class Referring(nn.Module):
    """A module that calls its parts through a list, a dict, and a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.inside = [self.a, {"b": self.b}]
        self.scale = torch.full((6,), 2.0, dtype=torch.float64)  # neither parameter nor buffer
        self.step = self.apply_all

    def apply_all(self, x: Tensor) -> Tensor:
        return self.inside[1]["b"](self.inside[0](x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


EXTRA = {"lstm": Recurrent, "references": Referring}


def model_of(name: str) -> nn.Module:
    model = settled(EXTRA[name]()) if name in EXTRA else make(name)
    return model.double()


def rows_of(step: int, count: int) -> Tensor:
    own = torch.Generator().manual_seed(step)
    return torch.randn(count, 6, generator=own, dtype=torch.float64)


def value_of(output: Any, name: str) -> Tensor:
    how = name.removeprefix("returns a ")
    return unwrapped(output, how) if how in OUTPUTS else output


def trained(model: nn.Module, name: str, rows: int) -> list[Tensor]:
    """Three updates; the outputs and gradients of each step, and the weights at the end."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    seen: list[Tensor] = []
    for step in range(3):
        out = value_of(model(rows_of(step, rows).requires_grad_()), name)
        out.square().mean().backward()
        seen.append(out.detach())
        seen += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
        optim.step()
        optim.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", [*MODELS, *EXTRA])
def test_outputs_gradients_and_updates_are_the_plain_modules(name: str, devices: int) -> None:
    """Seven rows on one, two or four devices: all of three steps to 1e-10."""
    plain = trained(model_of(name), name, 7)
    found = trained(sw.DataParallel(model_of(name), devices=["cpu"] * devices), name, 7)
    assert len(found) == len(plain)
    assert all(difference(a, b) <= 1e-10 for a, b in zip(found, plain, strict=True))


def test_inputs_are_differentiable_and_may_be_nested() -> None:
    """The gradient of an input in a dict is the plain module's; a number goes to all devices."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6).double()

        def forward(self, batch: dict[str, Any], *, power: int) -> dict[str, Any]:
            out = self.inner(batch["rows"][0]) ** power * batch["scale"]
            return {"out": Output(out), "loss": out.sum(), "power": power}

    def run(model: nn.Module) -> list[Tensor]:
        x, scale = rows_of(0, 5).requires_grad_(), torch.tensor(3.0).double().requires_grad_()
        found = model({"rows": (x, "text"), "scale": scale}, power=3)
        assert found["power"] == 3
        found["out"].value.square().sum().backward()
        assert x.grad is not None and scale.grad is not None
        return [found["out"].value.detach(), found["loss"].detach().sum(), x.grad, scale.grad]

    model = settled(Weighted())
    plain = run(model)
    found = run(sw.DataParallel(model, devices=["cpu", "cpu"]))
    assert all(difference(a, b) <= 1e-10 for a, b in zip(found, plain, strict=True))


def test_batch_norm_normalises_the_rows_of_a_replica_and_keeps_replica_0s_statistics() -> None:
    """Outputs are those of the module on each part; statistics those after the first part."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    plain, x = copy.deepcopy(model), rows_of(0, 7)
    parts = [copy.deepcopy(plain)(part) for part in x.tensor_split(2)]
    wrapped = sw.DataParallel(model, devices=["cpu", "cpu"])
    assert difference(wrapped(x).detach(), torch.cat(parts).detach()) <= 1e-10
    plain(x.tensor_split(2)[0])
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert difference(mine, other) <= 1e-10, name
    wrapped.eval()
    plain.eval()
    assert difference(wrapped(x).detach(), plain(x).detach()) <= 1e-10


def test_dropout_uses_one_mask_for_an_output_and_its_gradient() -> None:
    """Masks differ from replica to replica; a gradient is zero just where its output is."""
    wrapped = sw.DataParallel(nn.Dropout(0.5), devices=["cpu", "cpu"])
    x = torch.ones(64, 16, requires_grad=True)
    out = wrapped(x)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out.detach())
    assert not torch.equal(out[:32], out[32:])
    assert torch.equal(wrapped.eval()(x), x)


def test_a_module_that_changes_itself_keeps_what_replica_0_did() -> None:
    """A count and a clamped weight persist once; no copy's change reaches the module."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.weight = 0, nn.Parameter(torch.ones(6).double())

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                self.weight.mul_(2)
            return x * self.weight

    module = Changing()
    out = sw.DataParallel(module, devices=["cpu"] * 3)(torch.ones(3, 6).double())
    assert module.calls == 1
    assert torch.equal(module.weight.detach(), torch.full((6,), 2.0).double())
    assert out.detach().unique().tolist() == [2.0]


def test_state_dicts_have_the_plain_modules_keys() -> None:
    """Saved and loaded with and without the wrapper, alone and inside another module."""
    plain, wrapped = make("stack"), sw.DataParallel(make("stack"), devices=["cpu", "cpu"])
    inner = sw.DataParallel(make("stack"), devices=["cpu", "cpu"])
    outer = nn.ModuleDict({"part": inner})
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert list(outer.state_dict()) == [f"part.{key}" for key in plain.state_dict()]
    changed = {key: value + 1 for key, value in plain.state_dict().items()}
    wrapped.load_state_dict(changed)
    outer.load_state_dict({f"part.{key}": value for key, value in changed.items()})
    plain.load_state_dict(wrapped.state_dict())
    for found in (plain, wrapped.module, inner.module):
        assert all(torch.equal(value, changed[key]) for key, value in found.state_dict().items())
    assert sw.unwrap(wrapped) is wrapped.module


def test_a_replicas_error_is_raised_as_it_is_with_its_device() -> None:
    """Its class and text stay; a note names the replica that failed first, and the device."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x < 0).any():
                raise KeyError("negative")
            return x

    wrapped = sw.DataParallel(Picky(), devices=["cpu", "cpu", "cpu"])
    with pytest.raises(KeyError, match="negative") as caught:
        wrapped(torch.tensor([1.0, -1.0, -1.0]))
    assert caught.value.__notes__ == ["in replica 1 of 3, on cpu"]


REFUSED: dict[str, tuple[Any, str]] = {
    "no such GPU": (lambda: sw.DataParallel(Block(), ["cuda:99", "cuda:98"]), "cuda:99"),
    "no such device": (lambda: sw.DataParallel(Block(), ["gpu"]), "the device 'gpu'"),
    "meta": (lambda: sw.DataParallel(Block(), ["meta", "meta"]), "the device meta"),
    "a name": (lambda: sw.DataParallel(Block(), "cpu"), "a list with one device"),
    "none": (lambda: sw.DataParallel(Block(), []), "devices=\\[\\]"),
    "fewer rows": (lambda: on_two(Block())(torch.ones(1, 6)), "1 rows for 2 devices"),
    "other rows": (
        lambda: on_two(nn.Bilinear(6, 6, 2))(torch.ones(4, 6), torch.ones(1, 6)),
        r"\(4, 6\) and \(1, 6\)",
    ),
    "no rows": (lambda: on_two(Block())(3), "without a tensor"),
    "wrapped": (lambda: on_two(on_two(Block())), "sw.unwrap"),
    "wrapped by DDP": (lambda: on_two(sw.DDP(Block())), "sw.unwrap"),
    "inside DDP": (lambda: sw.DDP(on_two(Block())), "sw.unwrap"),
    "no module": (lambda: on_two(3), "an nn.Module instance"),
    "a compiled module": (
        lambda: on_two(torch.compile(Block(), backend="eager")),
        "without torch.compile",
    ),
    "changes its weights": (lambda: on_two(nn.Embedding(3, 2, max_norm=1.0)), "max_norm"),
    "elsewhere": (lambda: sw.replicas.replicate(Block().to("meta"), ["cpu", "cpu"]), "on meta"),
    "counts": (lambda: sw.replicas.parallel_apply([Block()], [1, 2]), "1 modules, 2 inputs"),
    "structures": (
        lambda: sw.replicas.gather([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "cpu"),
        "'b'",
    ),
    "order": (
        lambda: sw.replicas.gather(
            [dict.fromkeys(names, torch.ones(1)) for names in ("ab", "ba")], "cpu"
        ),
        "output 1",
    ),
    "lengths": (
        lambda: sw.replicas.gather([torch.ones(1, 2), torch.ones(1, 3)], "cpu"),
        "differ in dim 0",
    ),
    "nothing": (lambda: sw.replicas.gather([], "cpu"), "no outputs"),
}


def on_two(module: Any) -> nn.Module:
    return sw.DataParallel(module, devices=["cpu", "cpu"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """Each is one paragraph with what to write instead."""
    call, text = REFUSED[case]
    with pytest.raises(InputError, match=text) as caught:
        call()
    assert "Write instead:" in str(caught.value) and "\n" not in str(caught.value)


def test_threads_have_the_callers_state() -> None:
    """No gradients under no_grad and inference_mode; autocast's dtype under autocast."""
    model = on_two(nn.Linear(6, 6))
    x = torch.ones(4, 6)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x).requires_grad


def test_the_four_operations_compose_by_hand() -> None:
    """scatter, replicate, parallel_apply and gather are what a call of the wrapper does."""
    module, x, devices = settled(Block()), rows_of(0, 7).float(), ["cpu"] * 3
    parts = sw.replicas.scatter(x, devices)
    assert [len(part) for part in parts] == [3, 2, 2]
    replicas = sw.replicas.replicate(module, devices)
    assert replicas[0] is module and replicas[1].up is not module.up
    assert type(replicas[1]) is Block and not replicas[1].up.weight.is_leaf
    out = sw.replicas.gather(sw.replicas.parallel_apply(replicas, parts), "cpu")
    assert torch.allclose(out, module(x), atol=1e-6)
    assert torch.equal(
        sw.replicas.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu"), torch.tensor([1.0, 2.0])
    )


def test_replicas_do_not_outlive_a_step() -> None:
    """After the backward pass no copy is alive."""
    module = settled(Block())
    replicas = sw.replicas.replicate(module, ["cpu", "cpu"])
    copies = [weakref.ref(p) for p in replicas[1].parameters()]
    parts = sw.replicas.scatter(torch.ones(4, 6), ["cpu", "cpu"])
    torch.cat(sw.replicas.parallel_apply(replicas, parts)).sum().backward()
    del replicas
    gc.collect()
    assert [ref() for ref in copies] == [None] * len(copies)
