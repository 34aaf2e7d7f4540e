"""Models by name: of the package, of a user's file, and of a folder of transformers."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_command, predict_request
from shardwise.core.errors import InputError
from shardwise.models import hf, pretrained
from shardwise.models.registry import find
from shardwise.verify.command import verify
from tests.checkpoint.test_damage import little_memory, special

NET = """
import torch
from torch import nn
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

def wanting(width):
    return nn.Linear(width, 3)

def nothing():
    return 3

def leaving():
    raise SystemExit(3)

def pair():
    return nn.Linear(3, 3), lambda model, x: model(x).mean()

def single():
    return (nn.Linear(3, 3),)

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
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def test_a_gpt_by_name() -> None:
    """The size of gpt is tiny; model and batch are the same on every call; the loss is ln V."""
    found = find("gpt")
    first, second = found.build(), found.build()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    batch = found.batch(2, seed=5)
    assert torch.equal(batch["inputs"], found.batch(2, seed=5)["inputs"])
    assert not torch.equal(batch["inputs"], found.batch(2, seed=6)["inputs"])
    assert found.loss(first, batch).item() == pytest.approx(6.93, abs=0.2)
    assert found.tokens is not None and found.tokens(batch) == 2 * 64
    # as shapes alone, with the function that fills it later
    assert all(p.is_meta for p in find("gpt:small").build("meta").parameters())
    assert find("gpt:small").initial is not None


@pytest.mark.cases(3)
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


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("llama:7b", "Write instead: llama:70b"),
        ("gtp", "Write instead: gpt."),
        ("gpt:smal", "Write instead: gpt:small."),
        ("missing.py:build", "does not exist"),
        ("m" * 300 + ".py:build", "does not exist"),
        ("net.py", "Write instead: net.py:build."),
        ("toy:", "Write instead: toy:gpt2 or toy:llama"),
        ("toy:llamma", "llama"),
    ],
)
def test_a_name_that_is_none_gets_the_nearest(name: str, instead: str) -> None:
    """A misspelt model is answered with what to write."""
    if name.startswith("toy:"):
        pytest.importorskip("transformers")
    with pytest.raises(InputError, match="Allowed:") as caught:
        find(name)
    assert instead in str(caught.value)


def test_a_model_of_the_hub_is_the_folder_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub has downloaded it; what it cannot give is a paragraph."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    at = tmp_path / "models--org--small"
    hf.toy("llama").build().save_pretrained(at / "snapshots" / "abc")  # type: ignore[operator]
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text("abc")
    made = find("hf:org/small")
    assert made.loss(made.build(), made.make_batch(2, 0)).item() > 0
    with pytest.raises(InputError, match=r"no model of the Hub .*hf:\./org/other or toy:org"):
        find("hf:org/other")


def test_a_type_that_cannot_be_shrunk_says_so() -> None:
    """Where the small configuration does not give a model that runs, the reason is told."""
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=r"whose small configuration gives"):
        find("toy:deepseek_v2").build()


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


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("biuld", "build"),
        ("broken", "KeyError"),
        ("wanting", r"'width' \(net\.py\).*once net\.py is corrected"),
        ("nothing", "returns int"),
        ("leaving", "SystemExit: 3"),
        ("pair", "returns Linear, function.*Write instead: return model, loss, make_batch"),
        ("single", "returns Linear"),
        ("other", "returns int, builtin_function_or_method"),
        ("convolution", "first layer is a Conv2d"),
    ],
)
def test_the_users_mistakes_are_named(file: str, function: str, said: str) -> None:
    """A function that is missing, fails or returns something else is answered in a paragraph."""
    with pytest.raises(InputError, match=said):
        find(f"{file}:{function}").build()


def test_an_output_or_a_file_that_is_none_is_named(file: str, tmp_path: Path) -> None:
    """What forward gave, not where its missing loss stumbled; and the line of an error."""
    found = find(f"{file}:silent")
    phrase = "a Silent without a loss, whose forward returned a NoneType"
    with pytest.raises(InputError, match=phrase) as caught:
        found.loss(found.build(), found.batch(2, seed=0))
    assert "Write instead: return model, loss, make_batch" in str(caught.value)
    (tmp_path / "bad.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(InputError, match=r"ZeroDivisionError.*bad\.py, line 2"):
        find(f"{tmp_path}/bad.py:build")


NO_MODEL = "of which transformers makes no model"

Damage = Callable[[Path], object]


def config(**values: Any) -> Damage:
    """Other values in config.json."""

    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return act


def text(content: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(content)


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def long_header(folder: Path) -> None:
    """The length of the header says 2^60 bytes."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((2**60).to_bytes(8, "little"))


def index_of_a_pipe(folder: Path) -> None:
    """An index whose file of weights is a pipe."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


#: Each with what the error says.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "an unknown activation": (config(hidden_act="nonsense"), f"{NO_MODEL} .KeyError: 'nonsense'"),
    "a list": (text("[1]"), "it is no JSON object"),
    "nested lists": (text("[" * 10**5), r"config\.json', which is damaged"),
    "a pipe": (lambda folder: special(folder / "config.json", "fifo"), r"without config\.json"),
    "weights that are cut": (cut, r"model\.safetensors', which is damaged"),
    "a header of 2^60 bytes": (long_header, r"model\.safetensors', which is damaged"),
    "weights in a pipe": (
        lambda folder: special(folder / "model.safetensors", "fifo"),
        "no weights in it",
    ),
    "weights of an index in a pipe": (index_of_a_pipe, r"without a\.safetensors"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small llama, which can be read."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "llama"
    hf.toy("llama").build().save_pretrained(folder)  # type: ignore[operator]
    pretrained.read(folder, None)
    find(f"hf:{folder}").build()
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_an_absurd_folder_is_refused(name: str, whole: Path, tmp_path: Path):
    """By what trains it, and by what verifies it, before a model of these sizes is made."""
    folder = tmp_path / "folder"
    shutil.copytree(whole, folder)
    damage, message = DAMAGES[name]
    damage(folder)
    with little_memory():
        for use in (lambda: pretrained.read(folder, None), lambda: find(f"hf:{folder}").build()):
            with pytest.raises(InputError, match=message) as caught:
                use()
            assert "\n" not in str(caught.value)


@pytest.fixture(scope="module", params=["llama", "mixtral", "t5"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json alone, of a small model."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("alone") / request.param
    hf.small_config(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("plan", ["dp2 zero3", "tp2 bf16"])
def test_a_configuration_is_enough_for_a_prediction(alone: Path, plan: str) -> None:
    """States and bytes are those of the model with weights; activations too, without experts."""
    named = (configured(None, plan, name) for name in (f"hf:{alone}", f"toy:{alone.name}"))
    found, wanted = (predict_request(run, None, None, 0).prediction(0) for run in named)
    assert (found.memory, found.bytes) == (wanted.memory, wanted.bytes)
    assert found.activations == wanted.activations or alone.name == "mixtral"
    assert not found.notes


def test_what_needs_weights_refuses_a_configuration(alone: Path) -> None:
    """The model is not made, not with random weights either."""
    for use in (lambda: pretrained.read(alone, None), find(f"hf:{alone}").build):
        with pytest.raises(InputError, match="no weights in it"):
            use()
