from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.cli.predict_command import predict_command
from shardwise.core.errors import InputError
from shardwise.models import decoder
from shardwise.models.published import PUBLISHED
from shardwise.models.registry import find
from shardwise.verify.command import verify

THREE = """
import torch
from dataclasses import dataclass
from beside import WIDTH

@dataclass
class Sizes:
    width: int = WIDTH

def build():
    model = torch.nn.Linear(Sizes().width, 2)
    def loss(model, batch):
        return model(batch["x"]).pow(2).mean()
    def make_batch(rows, seed):
        return {"x": torch.full((rows, WIDTH), float(seed))}
    return model, loss, make_batch

def alone():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())

def words():
    return torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1))

def convolution():
    return torch.nn.Conv2d(3, 4, 1)

def broken():
    raise KeyError("no such thing")

def nothing():
    return 3

def leaving():
    raise SystemExit(3)

from torch import nn

def pair():
    return nn.Linear(3, 3), lambda model, x: model(x).mean()

def single():
    return (nn.Linear(3, 3),)

def numbers():
    return nn.Linear(3, 3), 1, 2

def other():
    return 3, len, len

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, y):
        return self.inner(x) + y

def two():
    return Two()

class Silent(Two):
    def forward(self, x):
        self.inner(x)

def silent():
    return Silent()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    path = tmp_path / "net.py"
    path.write_text(THREE)
    return str(path)


@pytest.mark.parametrize("name", ["gpt", "gpt:tiny"])
def test_a_gpt_by_name(name: str) -> None:
    """The size of gpt is tiny; model and batch are the same on every call; the loss is ln V."""
    found = find(name)
    first, second = found.build(), found.build()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    batch = found.batch(2, seed=5)
    assert torch.equal(batch["inputs"], found.batch(2, seed=5)["inputs"])
    assert not torch.equal(batch["inputs"], found.batch(2, seed=6)["inputs"])
    assert found.loss(first, batch).item() == pytest.approx(6.93, abs=0.2)
    assert found.tokens is not None and found.tokens(batch) == 2 * 64


def test_on_meta_nothing_is_filled() -> None:
    """A model can be had as shapes alone, with the function that fills it later."""
    found = find("gpt:small")
    assert all(p.is_meta for p in found.build("meta").parameters())
    assert found.initial is not None


#: As their model cards on Hugging Face count them.
COUNTS = {
    "gpt:1b": 1_100_048_384,
    "gpt:7b": 6_738_415_616,
    "llama:8b": 8_030_261_248,
    "llama:70b": 70_553_706_496,
    "mixtral:8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_published_number_of_parameters(name: str) -> None:
    """Exactly, by arithmetic and as a model on meta, which has no weights."""
    params = [*find(name).plain().parameters()]
    assert sum(p.numel() for p in params) == decoder.parameters(PUBLISHED[name]) == COUNTS[name]
    assert all(p.is_meta for p in params)


@pytest.mark.parametrize(
    "use",
    [
        lambda: find("llama:70b").build(),
        lambda: verify("dp2 zero3", "llama:70b"),
        lambda: predict_command(plan="dp2 zero3", model="llama:70b", measure=True),
    ],
    ids=["build", "verify", "predict --measure"],
)
def test_weights_that_do_not_fit_the_host_are_refused(use: Callable[[], object]) -> None:
    """Before any is allocated, with their size and what needs none."""
    with pytest.raises(InputError, match=r"GiB free.*need no weights") as found:
        use()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("llama:7b", "Write instead: llama:70b"),
        ("gtp", "Write instead: gpt."),
        ("gpt:smal", "Write instead: gpt:small."),
        ("hf", "Write instead: hf:"),
        ("missing.py:build", "does not exist"),
        ("m" * 300 + ".py:build", "does not exist"),
        ("net.py", "Write instead: net.py:build."),
    ],
)
def test_a_name_that_is_none_gets_the_nearest(name: str, instead: str) -> None:
    """A misspelt model is answered with what to write."""
    with pytest.raises(InputError, match="Allowed:") as caught:
        find(name)
    assert instead in str(caught.value)


def test_the_users_file_gives_model_loss_and_batch(file: str) -> None:
    """A user's build() is used as it is; files beside it can be imported, dataclasses defined."""
    found = find(f"{file}:build")
    batch = found.batch(3, seed=2)
    assert batch["x"].shape == (3, 5) and batch["x"][0, 0] == 2
    first, second = found.build(), found.build()
    assert torch.equal(found.loss(first, batch), found.loss(second, batch))


@pytest.mark.parametrize(("function", "shape"), [("alone", (2, 3)), ("words", (2, 16))])
def test_a_module_alone_gets_input_for_its_first_layer(
    file: str, function: str, shape: tuple[int, int]
) -> None:
    """From a module alone, input is made for the first layer and the loss can be trained on."""
    found = find(f"{file}:{function}")
    model, batch = found.build(), found.batch(2, seed=0)
    assert batch.shape == shape
    found.loss(model, batch).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("biuld", "build"),
        ("broken", "KeyError"),
        ("nothing", "returns a int"),
        ("leaving", "SystemExit: 3"),
        ("pair", "a tuple without make_batch.*Write instead: return model, loss, make_batch"),
        ("single", "a tuple without loss and make_batch"),
        ("numbers", "a tuple whose loss is a int, not a function"),
        ("other", "a tuple whose model is a int"),
        ("two", "forward does not take one input .*'y'.*return model, loss, make_b"),
        ("convolution", "first layer is a Conv2d"),
    ],
)
def test_the_users_mistakes_are_named(file: str, function: str, said: str) -> None:
    """A function that is missing, fails or returns something else is answered in a paragraph."""
    with pytest.raises(InputError, match=said):
        find(f"{file}:{function}").build()


def test_an_output_that_is_no_tensor_is_named(file: str) -> None:
    """A module alone is told what its forward gave, not where its missing loss stumbled."""
    found = find(f"{file}:silent")
    with pytest.raises(
        InputError, match="a Silent without a loss, whose forward returned a NoneType"
    ) as caught:
        found.loss(found.build(), found.batch(2, seed=0))
    assert "Write instead: return model, loss, make_batch" in str(caught.value)


def test_a_file_that_cannot_be_read_names_the_line(tmp_path: Path) -> None:
    """An error in the user's file is told with its file and line."""
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(InputError, match=r"ZeroDivisionError.*bad\.py, line 2"):
        find(f"{path}:build")
