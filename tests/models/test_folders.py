"""Folders of transformers with absurd contents: refused in one paragraph, nothing allocated."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.configured import configured
from shardwise.cli.predict_command import predict_request
from shardwise.core.errors import InputError
from shardwise.models import hf, pretrained
from shardwise.models.registry import find
from shardwise.prediction.prediction import Prediction
from tests.checkpoint.damage import limits, special

pytest.importorskip("transformers")

NO_MODEL = "of which transformers makes no model"
SIZE = r"config\.json'\. Allowed: a whole number from 1 to 128, which the weights"

Damage = Callable[[Path], object]


def config(**values: Any) -> Damage:
    """Other values in config.json."""

    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return act


def text(content: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(content)


def cut(folder: Path, length: int = 5000) -> None:
    os.truncate(folder / "model.safetensors", length)


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
    "no heads": (config(num_attention_heads=0), SIZE),
    "a text as a size": (config(hidden_size="64"), SIZE),
    "half a feature": (config(intermediate_size=0.5), SIZE),
    "10^12 features": (config(hidden_size=10**12), SIZE),
    "10^12 rows": (config(vocab_size=10**12), "a whole number from 6 to 128"),
    "-1 layers": (config(num_hidden_layers=-1), "num_hidden_layers = -1 in .* from 1 to 21"),
    "10^12 layers": (config(num_hidden_layers=10**12), "from 1 to 21"),
    "-1 layers in a part": (config(text_config={"n_layer": -1}), "n_layer = -1 in"),
    "negative positions": (config(max_position_embeddings=-5), "max_position_embeddings = -5"),
    "heads that do not divide": (config(num_attention_heads=3), NO_MODEL),
    "an unknown activation": (config(hidden_act="nonsense"), f"{NO_MODEL} .KeyError: 'nonsense'"),
    "no size": (config(hidden_size=None), NO_MODEL),
    "other weights": (config(tie_word_embeddings="x"), NO_MODEL),
    "a list": (text("[1]"), "it is no JSON object"),
    "nested lists": (text("[" * 10**5), r"config\.json', which is damaged"),
    "a pipe": (lambda folder: special(folder / "config.json", "fifo"), r"without config\.json"),
    "a device": (lambda folder: special(folder / "config.json", "device"), r"without config\.json"),
    "a type of model that is a list": (config(model_type=["llama"]), r"without config\.json"),
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
    folder = tmp_path_factory.mktemp("models") / "llama"
    hf.find("llama").build().save_pretrained(folder)  # type: ignore[operator]
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
    with limits():
        for use in (lambda: pretrained.read(folder, None), lambda: find(f"hf:{folder}").build()):
            with pytest.raises(InputError, match=message) as caught:
                use()
            assert "\n" not in str(caught.value)


@pytest.fixture(scope="module", params=["llama", "mixtral", "t5"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json alone, of a small model."""
    folder = tmp_path_factory.mktemp("alone") / request.param
    hf.small_config(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("plan", ["dp2 zero3", "tp2 bf16"])
def test_a_configuration_is_enough_for_a_prediction(alone: Path, plan: str) -> None:
    """States and bytes are those of the model with weights; activations too, without experts."""
    named = (configured(None, plan, f"hf:{name}") for name in (alone, alone.name))
    found, wanted = (predict_request(run, None, None, 0).prediction(0) for run in named)
    assert (found.memory, found.bytes) == (wanted.memory, wanted.bytes)
    assert found.activations == wanted.activations or alone.name == "mixtral"
    assert not found.notes


def test_a_configuration_is_enough_for_the_prediction_of_a_run(whole: Path, tmp_path: Path) -> None:
    """`predict --config` for a folder without weights is that for the folder with them."""
    (tmp_path / "alone").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "alone")
    found, wanted = (_of_run(folder, tmp_path) for folder in (tmp_path / "alone", whole))
    assert (found.memory, found.bytes) == (wanted.memory, wanted.bytes)
    assert found.device_peak == wanted.device_peak


def _of_run(folder: Path, tmp_path: Path) -> Prediction:
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\nname = "hf:{folder}"\n[plan]\ntext = "dp2 zero3"')
    return predict_request(configured(file, None, None), 4, 16, 0).prediction(0)


def test_what_needs_weights_refuses_a_configuration(alone: Path) -> None:
    """The model is not made, not with random weights either."""
    for use in (lambda: pretrained.read(alone, None), find(f"hf:{alone}").build):
        with pytest.raises(InputError, match="no weights in it"):
            use()


@pytest.mark.parametrize("values", [{"hidden_size": 10**12}, {"num_hidden_layers": -1}])
def test_an_absurd_configuration_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    """Without weights too, before a model of these sizes is made."""
    hf.small_config("llama").save_pretrained(tmp_path)
    config(**values)(tmp_path)
    with limits(), pytest.raises(InputError, match=r"config\.json'\. Allowed: a whole number"):
        find(f"hf:{tmp_path}")
