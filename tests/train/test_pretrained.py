"""A run of a model in a folder of transformers, from its weights to a folder of the trained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.export import export
from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.models import hf, pretrained
from shardwise.models.hf import causal_loss
from shardwise.train import config
from shardwise.train.data.tokens import load_tokenizer, train_bpe
from shardwise.train.prepare import RunStart, prepare
from shardwise.train.sizes import model_sizes
from tests.train.runs import run, settings

transformers = pytest.importorskip("transformers")


def folder(kind: str, at: Path, **changes: Any) -> Path:
    """A small model of a type, with a word for every byte."""
    sizes = hf.small_config(kind)
    sizes.update({"vocab_size": 257} | changes)
    torch.manual_seed(0)
    family = transformers.AutoModelForMaskedLM if kind == "bert" else None
    (family or transformers.AutoModelForCausalLM).from_config(sizes).save_pretrained(at)
    return at


def configured(at: Path, weights: Path, plan: str, **train: Any) -> config.Config:
    base = settings(at, plan, **train).model_dump()
    model = {"name": f"hf:{weights}", "sequence": 13}
    return config.build(base | {"model": model})


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "plan"), [("llama", "tp2 zero1"), ("gpt2", "dp2 zero3"), ("mixtral", "pp2 1f1b:2")]
)
def test_every_plan_trains_the_weights_of_the_folder(kind: str, plan: str, tmp_path: Path):
    """The losses are those of one process, and the first that of transformers itself."""
    weights = folder(kind, tmp_path / "w")
    alone = configured(tmp_path / "one", weights, "fp64", steps=3)
    expected = [each.loss for each in run(alone)]
    rows = prepare(alone, 1, RunStart(overwrite=True))
    numbers = rows.batches.numbers(0)
    batch = rows.corpus.rows(numbers)
    plain = transformers.AutoModelForCausalLM.from_pretrained(weights).double()
    tensors = {
        "inputs": torch.from_numpy(batch.inputs),
        "targets": torch.from_numpy(batch.targets),
    }
    with torch.no_grad():
        assert expected[0] == pytest.approx(float(causal_loss(plain, tensors)), rel=1e-10)
    given = configured(tmp_path / "two", weights, f"{plan} fp64", steps=3)
    assert [each.loss for each in run(given, ranks=2)] == pytest.approx(expected, rel=1e-10)


@pytest.mark.full
def test_its_run_is_exported_for_transformers(tmp_path: Path):
    """Trained, resumed, exported; from_pretrained has the weights of the last checkpoint."""
    weights = folder("llama", tmp_path / "w")
    run(configured(tmp_path / "run", weights, "dp2 zero3", steps=3), ranks=2)
    given = configured(tmp_path / "run", weights, "zero1", steps=5)
    steps = [each.step for each in run(given, start=RunStart(resume=True))]
    assert steps == [1, 2, 3, 4, 5]
    export(tmp_path / "run" / "checkpoints", tmp_path / "out")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(at).state_dict()
        for at in (weights, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_operations_and_parameters_are_counted(tmp_path: Path):
    """By hand: of four experts two are used; embeddings are not multiplied, a tied head is."""
    found = pretrained.read(folder("mixtral", tmp_path / "m"), None)
    attention = 64 * 16 * (4 + 2 + 2 + 4)
    layer = attention + 4 * 64 + 2 * 3 * 64 * 96 + 2 * 64
    assert found.multiplied == 2 * layer + 64 + 64 * 257
    assert found.parameters == found.multiplied + 2 * 2 * 3 * 64 * 96 + 64 * 257
    assert found.sequence == 64
    tied = pretrained.read(folder("llama", tmp_path / "t", tie_word_embeddings=True), 8)
    assert tied.multiplied == tied.parameters
    assert pretrained.flops_per_token(tied) == 6 * tied.parameters + 12 * 2 * 64 * 8


@pytest.mark.parametrize(
    ("tokens", "plan", "ranks"),
    [("folder", "fp64", 1), ("bpe:300", "pp2 1f1b:2 fp64", 2), ("bytes", "dp2 zero3 fp64", 2)],
)
def test_an_export_has_what_transformers_loads(
    tokens: str, plan: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Tokenizer and generation as in the model's folder; or that of the run; or a line says no."""
    weights = folder("llama", tmp_path / "w", vocab_size=300)
    words = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=256, do_sample=True)
    words.save_pretrained(weights)
    if tokens == "folder":
        train_bpe(["some text", "and more"], 300).save(weights / "tokenizer.json")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77}
        (weights / "tokenizer_config.json").write_text(json.dumps(about))
        tokens = str(weights / "tokenizer.json")
    base = configured(tmp_path / "run", weights, plan, steps=2).model_dump()
    given = config.build(base | {"data": base["data"] | {"tokens": tokens}})
    run(given, ranks)
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "export", str(given.folder), "--to", str(tmp_path / "out")])
    said = capsys.readouterr().out
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (made.generation_config.max_new_tokens, made.generation_config.do_sample) == (3, True)
    if tokens == "bytes":
        assert "no tokenizer: the run's tokens are bytes" in said
        return
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    vocabulary = load_tokenizer(given.folder / "tokenizer" / "tokenizer.json")
    assert read("some more text")["input_ids"] == vocabulary.encode("some more text").tolist()
    assert read.model_max_length == 77 or read.eos_token_id == vocabulary.separator
    assert "generation_config.json, the run's tokenizer" in said


def test_the_folders_tokenizer_is_the_runs(tmp_path: Path):
    """Unless the configuration names other tokens."""
    (tmp_path / "tokenizer.json").write_text("{}")
    model = {"name": f"hf:{tmp_path}"}
    assert config.build({"model": model}).data.tokens == str(tmp_path / "tokenizer.json")
    assert config.build({"model": model, "data": {"tokens": "bytes"}}).data.tokens == "bytes"


@pytest.mark.parametrize(
    ("model", "phrase"),
    [
        ({"name": "hf:llama"}, r"model\.name = 'hf:\./llama'"),
        ({"name": "hf:./absent"}, "no such folder"),
        ({"name": "hf:./w", "layers": 3}, r"leave model\.layers out"),
        ({"name": "hf:./w", "sequence": 65}, "at most its 64 positions"),
        ({"name": "hf:./bert"}, "a causal language model"),
        ({"name": "hf:./part"}, "which lacks 1 weights of its LlamaForCausalLM, the first lm_head"),
        ({"name": "hf:./bare"}, "the folder 'bare' without config.json"),
        ({"name": "hff:./w"}, "hf:./FOLDER or file.py:build"),
    ],
)
def test_bad_input_is_one_paragraph(
    model: dict[str, Any], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    for kind, at in (("llama", "w"), ("bert", "bert")):
        folder(kind, tmp_path / at)
    from safetensors.torch import load_file, save_file

    state = load_file("w/model.safetensors")
    for name in ("part", "bare"):
        Path(name).mkdir()
        save_file(
            {k: t for k, t in state.items() if "lm_head" not in k}, f"{name}/model.safetensors"
        )
    Path("part/config.json").write_text(json.dumps(json.loads(Path("w/config.json").read_text())))

    def begin() -> None:
        sizes = model_sizes(config.build({"model": model}).model, 257)
        assert isinstance(sizes, pretrained.FolderConfig)
        pretrained.fill(sizes)("lm_head.weight", torch.empty(257, 64))

    with pytest.raises(InputError, match=phrase) as found:
        begin()
    assert not re.search("Traceback|\n\n", str(found.value))
