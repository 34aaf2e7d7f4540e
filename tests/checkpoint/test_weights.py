"""Weights as safetensors: exported with the model's own names, imported under any plan."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import shardwise as sw
from shardwise.checkpoint.export import export, import_weights
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.models import hf
from shardwise.models.registry import find
from tests.checkpoint.support import squares, steps
from tests.pool import run_gloo
from tests.train.runs import ended

SGD = sw.SGD(lr=0.1)


class Model(nn.Module):
    """A tied weight, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = (nn.Linear(6, 6) for _ in range(3))
        self.leave.weight = self.enter.weight
        self.register_buffer("ramp", torch.arange(6.0))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.enter.weight)
        return self.leave(self.inner(self.enter(x)).tanh() + self.ramp.to(x))


def trained(world: World, plan: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = sw.parallelize(Model(), plan, world, optimizer=SGD, loss=squares)
    steps(engine, 0, 2)
    sw.save(engine, folder)
    return sw.full_state_dict(engine)


Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, run_gloo(2, trained, "dp2 zero3 fp32", str(folder))[0]


@pytest.mark.parametrize("plan", ["dp2 bf16", "pp2 1f1b:2 fp32"])
def test_the_names_are_those_of_the_plain_model(plan: str, tmp_path: Path):
    """The library loads the folder into the plain model; tied weights are written once."""
    state = run_gloo(2, trained, plan, str(tmp_path / "run"))[0]
    done = export(tmp_path / "run", tmp_path / "weights")
    assert {*load_file(done.path / "model.safetensors")} == state.keys() - {"leave.weight"}
    model = Model()
    load_model(model, done.path / "model.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def begun(world: World, plan: str, run_folder: str) -> dict[str, Any]:
    """An engine with other weights, after loading."""
    torch.manual_seed(1)
    engine = sw.parallelize(Model(), plan, world, optimizer=sw.AdamW(lr=0.01), loss=squares)
    assert sw.load(engine, Path(run_folder) / "checkpoints") == {}
    assert engine.steps == 0
    state = sw.full_state_dict(engine)
    steps(engine, 0, 1)
    return state


@pytest.mark.parametrize("plan", ["dp2 zero1 bf16", "pp2 1f1b:2 fp64"])
def test_imported_weights_begin_a_run_under_any_plan(plan: str, saved: Saved, tmp_path: Path):
    """Every rank takes its part of each tensor, in the dtype of its own; files have an index."""
    done = export(saved[0], tmp_path / "weights", file_bytes=150)
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    assert done.files > 2 and index["metadata"] == {"total_size": done.bytes}
    import_weights(tmp_path / "weights", tmp_path / "begun")
    state = run_gloo(2, begun, plan, str(tmp_path / "begun"))[0]
    assert all(torch.equal(value, saved[1][key].to(value)) for key, value in state.items())


# --- models of transformers ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file_bytes"), [("gpt2", 50_000), ("t5", 2**30)])
def test_transformers_loads_what_is_exported(name: str, file_bytes: int, tmp_path: Path):
    """`from_pretrained` of the folder, of many small files too, is the trained model."""
    transformers = pytest.importorskip("transformers")
    found = hf.toy(name)
    model = found.build()
    engine = sw.parallelize(model, "fp32", alone(), optimizer=SGD, loss=found.loss)
    engine.step(found.batch(2, 0))
    sw.save(engine, tmp_path / "run" / "checkpoints")
    done = export(tmp_path / "run", tmp_path / "weights", file_bytes=file_bytes)
    assert (done.files > 3) == (name == "gpt2")
    plain = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "weights")
    with torch.no_grad():
        ours, theirs = (found.loss(one.eval(), found.batch(2, 1)) for one in (model, plain))
    assert torch.equal(ours, theirs)


def losses(world: World, name: str, folder: str, plan: str) -> list[float]:
    """Two steps of a model of transformers that was made on the meta device."""
    found, fill = hf.toy(name), sw.fill_from(folder)
    with torch.device("meta"):
        model = hf.find(folder).make()
    counts = {"loss": found.loss, "tokens": found.tokens}
    engine = sw.parallelize(model, plan, world, optimizer=SGD, fill=fill, **counts)
    rows = found.batch(4, 1)
    part = {k: v.chunk(engine.data_ranks)[engine.data_rank] for k, v in rows.items()}
    return [engine.step(part).loss for _ in range(2)]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi3"])
def test_a_model_of_transformers_is_filled_from_a_folder(name: str, tmp_path: Path):
    """On the meta device: its weights are the folder's, its buffers those of the library."""
    pytest.importorskip("transformers")
    found = hf.toy(name)
    model: Any = found.build()
    model.save_pretrained(tmp_path / "w")
    engine = sw.parallelize(model, "fp32", alone(), optimizer=SGD, loss=found.loss)
    expected = [engine.step(found.batch(4, 1)).loss for _ in range(2)]
    for got in run_gloo(2, losses, name, str(tmp_path / "w"), "dp2 zero3 fp32"):
        assert got == pytest.approx(expected, rel=1e-6)


def test_a_weight_that_a_folder_has_not_is_refused(saved: Saved, tmp_path: Path):
    """By its name, or by its shape."""
    fill = sw.fill_from(export(saved[0], tmp_path / "weights").path)
    with pytest.raises(InputError, match=r"the weight 2\.weight, which is not in"):
        fill("2.weight", torch.ones(6, 6))
    with pytest.raises(InputError, match=r"the weight enter\.weight of shape \(3, 6\)"):
        fill("enter.weight", torch.ones(3, 6))


def test_a_folder_of_transformers_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`hf:./folder` has the weights of the folder; those of single experts are stacked there."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model: Any = hf.toy("llama").build()
    model.save_pretrained("w")
    made = find("hf:./w").build()
    assert all(map(torch.equal, model.parameters(), made.parameters()))
    Path("w/config.json").write_text("{}")
    with pytest.raises(InputError, match=r"without config\.json of a model of transformers"):
        find("hf:./w")
    experts: Any = hf.toy("mixtral").build()
    experts.save_pretrained("experts")
    with pytest.raises(InputError, match=r"\.experts\.0\..* --model hf:.*experts\."):
        import_weights(tmp_path / "experts", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the commands -------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code, out, err = ended(capsys, "checkpoint", *argv)
    return code, (out + err).strip()


def test_the_commands(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Export in bf16, import; a folder that exists is replaced only with --overwrite."""
    folder, other = str(tmp_path / "w"), str(tmp_path / "other")
    for more in ([], ["--overwrite", "--dtype", "bf16"]):
        code, text = said(capsys, "export", str(saved[0]), "--to", folder, *more)
        assert (code, "6 tensors, " in text) == (0, True)
    assert {t.dtype for t in load_file(f"{folder}/model.safetensors").values()} == {torch.bfloat16}
    for more in ([], ["--overwrite"]):
        assert said(capsys, "import", folder, "--to", other, *more)[0] == 0
    assert "6 tensors" in said(capsys, "inspect", other)[1]


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("export run", "Missing option '--to'.* instead: shardwise checkpoint export"),
        ("import there", "Missing option '--to'.* instead: shardwise checkpoint import"),
        ("export run --to there", "the folder '.*there', which exists"),
        ("export run --to there --overwrite", r"which has other files \(my_model"),
        ("export run --to . --overwrite", r"which exists\. Allowed: a new folder.*--to /"),
        ("export run --to run/latest/x", "which cannot be written"),
        ("export absent --to new", "no such folder"),
        ("export run --to new --dtype int8", "--dtype int8"),
        ("inspect absent", "no such folder"),
        ("inspect broken/model.safetensors", "a file, not a folder"),
        ("inspect there", "no complete checkpoint in it"),
        (f"inspect {'a' * 300}", "File name too long"),
        ("import absent --to new", "no weights in it"),
        ("import broken --to new", "model.safetensors', which is damaged"),
        ("import index --to new", "without a.safetensors, which its index names"),
        ("import wrong --to new", "it has no weight_map"),
    ],
)
def test_bad_input_is_one_paragraph(
    line: str,
    phrase: str,
    saved: Saved,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Exit code 2; and nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(saved[0])
    for name in ("there", "broken", "index", "wrong"):
        Path(name).mkdir()
    Path("there/my_model.safetensors").touch()
    Path("broken/model.safetensors").write_bytes(b"nothing")
    index = {"weight_map": {"w": "a.safetensors"}}
    Path("index/model.safetensors.index.json").write_text(json.dumps(index))
    Path("wrong/model.safetensors.index.json").write_text("{}")
    before = sorted(map(str, tmp_path.rglob("*")))
    code, text = said(capsys, *line.split())
    assert code == 2 and "\n" not in text
    assert re.search(phrase, text), text
    assert sorted(map(str, tmp_path.rglob("*"))) == before
