"""A model, weights and callbacks of the user's own: `file.py:function`, `hf:./folder`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.folder import find
from shardwise.checkpoint.open_checkpoint import open_checkpoint
from shardwise.comm.world import alone
from shardwise.core.errors import InputError, RankError
from shardwise.models import pretrained
from shardwise.train import config, loop
from shardwise.train.data.tokens import load_tokenizer, train_bpe
from shardwise.train.metrics import read
from shardwise.train.model import model_sizes
from shardwise.train.prepare import RunStart
from tests.docs.pages import file_of
from tests.train import runs
from tests.train.runs import model_folder, printed, run, settings

MORE = """
import torch

Net.tensor_table = {"up": "colwise", "down": "rowwise"}

def small():
    return Net(vocabulary=100)

class Pair(Net):
    def forward(self, tokens):
        return super().forward(tokens), tokens

def with_loss():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["inputs"])[0].mT, batch["targets"])
    return Pair(), loss, lambda rows, seed: torch.zeros(rows, 3)
"""
#: The model of the page, with a table; one of too few words; one that returns no logits.
MODEL = file_of("docs/tutorials/your-model.md", "model.py") + MORE


def own(folder: Path, function: str = "build", plan: str = "fp64") -> config.Config:
    """A run of three steps with the model of a file."""
    folder.mkdir(exist_ok=True)
    file = folder / "net.py"
    file.write_text(MODEL)
    made = settings(folder / "run", plan, steps=3).model_dump()
    made["model"] = {"name": f"{file}:{function}", "sequence": 13}
    return config.build(made)


def losses(given: config.Config, ranks: int = 1) -> list[float]:
    return [record.loss for record in run(given, ranks)]


@pytest.mark.parametrize("plan", ["tp2", "dp2 zero3"])
def test_ranks_train_it_as_one_process_does(plan: str, tmp_path: Path):
    """The losses of each step in fp64, with its own table under tp."""
    wanted = losses(own(tmp_path / "one"))
    assert len(wanted) == 3 and wanted[-1] < wanted[0]
    two = own(tmp_path / "two", plan=f"{plan} fp64")
    assert losses(two, 2) == pytest.approx(wanted, rel=1e-10)


def test_its_own_loss_and_no_logits(tmp_path: Path) -> None:
    """A loss with the model is the run's; the model may return no logits."""
    wanted = losses(own(tmp_path / "one"))
    given = own(tmp_path / "loss", "with_loss")
    runs.trained(alone(), given)
    assert f"{wanted[-1]:.4f}" in (given.folder / "report.md").read_text()


# --- models of transformers ---------------------------------------------------------------------


def loaded(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("tokens", "plan", "ranks"),
    [("folder", "fp64", 1), ("bpe:300", "pp2 1f1b:2 fp64", 2), ("bytes", "dp2 zero3 fp64", 2)],
)
def test_an_export_has_what_transformers_loads(
    tokens: str, plan: str, ranks: int, tmp_path: Path, capsys: runs.Capture
):
    """Trained weights; tokenizer and generation of the model's folder or the run; or a line."""
    transformers = pytest.importorskip("transformers")
    weights = model_folder("llama", tmp_path / "w", vocab_size=300)
    words = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=256, do_sample=True)
    words.save_pretrained(weights)
    if tokens == "folder":
        train_bpe(["some text", "and more"], 300).save(weights / "tokenizer.json")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77}
        (weights / "tokenizer_config.json").write_text(json.dumps(about))
        tokens = str(weights / "tokenizer.json")
    given = runs.pretrained(tmp_path / "run", weights, plan, steps=2)
    given = runs.changed(given, "data", tokens=tokens)
    run(given, ranks)
    assert len(run(runs.changed(given, "train", steps=3), ranks, RunStart(resume=True))) == 3
    said = printed(capsys, "checkpoint", "export", str(given.folder), "--to", str(tmp_path / "out"))
    before, made = loaded(weights).state_dict(), loaded(tmp_path / "out")
    assert before.keys() == made.state_dict().keys()
    assert not any(torch.equal(before[name], x) for name, x in made.state_dict().items())
    assert (made.generation_config.max_new_tokens, made.generation_config.do_sample) == (3, True)
    if tokens == "bytes":
        assert "no tokenizer: the run's tokens are bytes" in said
        return
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    vocabulary = load_tokenizer(given.folder / "tokenizer" / "tokenizer.json")
    assert read("some more text")["input_ids"] == vocabulary.encode(["some more text"])[0].tolist()
    assert read.model_max_length == 77 or read.eos_token_id == vocabulary.separator
    assert "generation_config.json, tokenizer.json" in said


def test_operations_and_parameters_are_counted(tmp_path: Path):
    """By hand: of four experts two are used; embeddings are not multiplied, a tied head is."""
    found = pretrained.read(model_folder("mixtral", tmp_path / "m"), None)
    attention = 64 * 16 * (4 + 2 + 2 + 4)
    layer = attention + 4 * 64 + 2 * 3 * 64 * 96 + 2 * 64
    assert found.multiplied == 2 * layer + 64 + 64 * 257
    assert found.parameters == found.multiplied + 2 * 2 * 3 * 64 * 96 + 64 * 257
    assert found.sequence == 64
    tied = pretrained.read(model_folder("llama", tmp_path / "t", tie_word_embeddings=True), 8)
    assert tied.multiplied == tied.parameters
    assert tied.flops_per_token == 6 * tied.parameters + 12 * 2 * 64 * 8


def test_the_folders_tokenizer_is_the_runs(tmp_path: Path):
    """Unless the configuration names other tokens."""
    (tmp_path / "tokenizer.json").write_text("{}")
    model = {"name": f"hf:{tmp_path}"}
    assert config.build({"model": model}).data.tokens == str(tmp_path / "tokenizer.json")
    assert config.build({"model": model, "data": {"tokens": "bytes"}}).data.tokens == "bytes"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("plan", ["dp2 zero3 fp64", "tp2 fp64"])
def test_adapters_train_alone_and_are_exported_for_peft(
    plan: str, tmp_path: Path, capsys: runs.Capture
):
    """As on one process, resumed on another number of ranks; the weights of the folder stay."""
    peft, weights = pytest.importorskip("peft"), model_folder("llama", tmp_path / "w")
    made = runs.pretrained(tmp_path / "one", weights, "fp64", steps=4, save_every=2)
    lora = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ("q_proj", "down_proj")}
    one = runs.changed(made, "model", **lora)
    wanted = losses(one)
    two = runs.changed(one, "run", folder=str(tmp_path / "two"))
    run(runs.changed(two, "train", steps=2))
    two = runs.changed(two, "plan", text=plan)
    saved = open_checkpoint(find(two.folder / "checkpoints")).tensors
    assert all("lora_" in name for name in saved if name.startswith("model/"))
    assert [r.loss for r in run(two, 2, RunStart(resume=True))] == pytest.approx(wanted, rel=1e-9)
    printed(capsys, "checkpoint", "export", str(two.folder), "--to", str(tmp_path / "out"))
    assert (tmp_path / "out/adapter_model.safetensors").stat().st_size < 50_000
    found = peft.PeftModel.from_pretrained(loaded(weights).double(), tmp_path / "out")
    rows = torch.arange(26).view(2, 13)
    with torch.no_grad():
        assert not torch.equal(found(rows).logits, loaded(weights).double()(rows).logits)
    assert found.peft_config["default"].r == 2


@pytest.mark.parametrize(
    ("model", "phrase"),
    [
        ({"name": "hf:./w", "lora_rank": 2, "lora_targets": ["query"]}, "Target modules .*query"),
        ({"name": "hf:./w", "lora_alpha": 2}, r"model\.lora_rank beside it"),
        ({"lora_rank": 2}, r"adapters beside a model hf:\./FOLDER"),
        ({"name": "toy:llama"}, r"model\.name = 'toy:llama'"),
        ({"name": "hf:./absent"}, "no weights in it"),
        ({"name": "hf:./w", "layers": 3}, r"leave model\.layers out"),
        ({"name": "hf:./w", "sequence": 65}, "at most its 64 positions"),
        ({"name": "hf:./bert"}, "a causal language model"),
        ({"name": "hf:./part"}, "which lacks 1 weights of its LlamaForCausalLM, the first lm_head"),
        ({"name": "hf:./bare"}, "the folder 'bare' without config.json"),
        ({"name": "net.py:build"}, r"without model\.sequence.*model\.sequence = 128"),
        (
            {"name": "net.py:build", "sequence": 13, "hidden_size": 16},
            r"model\.hidden_size with model\.name",
        ),
        ({"name": "net.py:small", "sequence": 13}, r"below 257 gives IndexError.*\(net\.py, line"),
        (
            {"name": "net.py:bild", "sequence": 13},
            r"no function \"bild\".*instead: .*net\.py:build",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    model: dict[str, Any], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In one paragraph before anything is written."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    kind = re.match(r"hf:\./(w|bert|part|bare)", model.get("name", ""))
    if kind is not None:
        family, tied = "bert" if kind[1] == "bert" else "llama", kind[1] == "part"
        file = model_folder(family, tmp_path / kind[1], tie_word_embeddings=tied) / "config.json"
        file.write_text(file.read_text().replace('embeddings": true', 'embeddings": false'))
        if kind[1] == "bare":
            file.unlink()
    values = settings(tmp_path / "run").model_dump() | {"model": model}

    def begin() -> None:
        given = config.build(values)
        if kind is None:
            loop.train(given, alone())
        sizes = model_sizes(given.model, 257)
        assert isinstance(sizes, pretrained.FolderConfig)
        sizes.fill(0)("lm_head.weight", torch.empty(257, 64))

    with pytest.raises(InputError, match=phrase) as found:
        begin()
    assert "\n\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


# --- callbacks ----------------------------------------------------------------------------------

MINE = """
import shardwise as sw

class Mine(sw.callbacks.Callback):
    all_ranks = True

    def run_began(self, run):
        self.rank, self.file = run.rank, run.folder.parent / f"seen-{run.rank}"

    def step_ended(self, step, metrics):
        self.write("step", step, metrics["loss/train"])
        if step == 4 and self.rank == 1:
            raise ValueError("enough")

    def evaluated(self, step, metrics):
        self.write("evaluated", step, metrics["loss/validation"])

    def saved(self, step, path):
        self.write("saved", step, path.name)

    def write(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

def make():
    return Mine()

def number():
    return 3
"""


def called(folder: Path, function: str) -> config.Config:
    """A run of seven steps with a callback from a file."""
    file = folder / "mine.py"
    file.write_text(MINE)
    return runs.changed(settings(folder / "run"), "run", callbacks=(f"{file}:{function}",))


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path):
    """It is called after each step, evaluation and save, on both ranks, until one of them fails."""
    with pytest.raises(RankError, match="callback Mine failed in step_ended: ValueError: enough"):
        run(called(tmp_path, "make"), ranks=2)
    wanted: list[str] = []
    for record in read(tmp_path / "run"):
        wanted.append(f"step {record.step} {record.loss}")
        wanted += [f"evaluated 3 {record.validation}"] if record.step == 3 else []
        wanted += ["saved 2 step-000002"] if record.step == 2 else []
    assert len(wanted) == 4 + 2
    for rank in range(2):
        assert (tmp_path / f"seen-{rank}").read_text().splitlines() == wanted


def test_a_function_that_makes_no_callback_is_refused(tmp_path: Path):
    """Before the run begins, in one paragraph; the run's folder is not made."""
    with pytest.raises(InputError, match="callback 3, which is without run_began"):
        run(called(tmp_path, "number"))
    assert not (tmp_path / "run").exists()
