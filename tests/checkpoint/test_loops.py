"""Checkpoints of a module in a loop of the program's own, what does not fit, and `inspect`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.export import export
from shardwise.checkpoint.open_checkpoint import describe
from shardwise.checkpoint.save import save
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.support import (
    Own,
    Sum,
    boxes_of,
    chain,
    engine_of,
    rows,
    sample,
    save_by_all,
    steps,
)
from tests.engine.loops import wrap
from tests.pool import run_gloo
from tests.train.runs import ended


class Whole(torch.optim.Adafactor):
    """A class of a program that needs whole tensors."""

    elementwise = False


KINDS: dict[str, Any] = {
    "Adafactor": torch.optim.Adafactor,
    "Whole": Whole,
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1, amsgrad=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Own": Own,
}


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    named = list(module.named_parameters())
    weights = [p for n, p in named if n.endswith("weight")]
    biases = [p for n, p in named if not n.endswith("weight")]
    return KINDS[kind]([{"params": weights}, {"params": biases, "lr": 0.003}], lr=0.02)


def part(
    world: World, folder: str, how: str, kind: str, numbers: range, later: bool
) -> dict[str, Any]:
    """Steps of a loop, from a checkpoint if `later`, to one if not; those of "plain" alone."""
    module = Sum() if how == "plain" else wrap(how, Sum(), world)
    optim = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    if later:
        extra = sw.load(module, folder, optimizer=optim)
        scheduler.load_state_dict(extra["scheduler"])
        assert extra["at"] == numbers.start
    for step in numbers:
        split = how not in ("Pipe", "plain")
        x = rows(step)[world.rank :: world.size] if split else rows(step)
        loss = module(x, int(step >= 3)).square().sum()
        (loss * (world.size if split else 1)).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    if how == "plain":
        return dict(module.state_dict())
    if not later:
        extra = {"at": numbers.stop, "scheduler": scheduler.state_dict()}
        assert sw.save(module, folder, extra, optimizer=optim).name == "step-000001"
    return sw.full_state_dict(module)


def run(ranks: int, *args: Any) -> dict[str, Tensor]:
    return part(alone(), *args) if ranks == 1 else run_gloo(ranks, part, *args)[0]


@pytest.mark.parametrize(
    ("kind", "here", "before", "there", "after"),
    [
        ("AdamW", "FULL_SHARD", 2, "DDP", 1),
        ("Own", "Pipe", 2, "FULL_SHARD", 2),
        ("SGD", "DDP", 1, "FULL_SHARD", 3),
        ("Own", "SHARD_GRAD_OP", 3, "Pipe", 2),
        ("Adafactor", "FULL_SHARD", 3, "FULL_SHARD", 2),
        ("Whole", "DDP", 2, "SHARD_GRAD_OP", 3),
        ("Adafactor", "FULL_SHARD", 2, "Pipe", 2),
    ],
)
def test_a_loop_goes_on(tmp_path: Path, kind: str, here: str, before: int, there: str, after: int):
    """On other ranks, wrapped otherwise: as without a break, rates and numbers of states too."""
    run(before, str(tmp_path), here, kind, range(2), False)
    found = run(after, str(tmp_path), there, kind, range(2, 6), True)
    want = part(alone(), "", "plain", kind, range(6), False)
    for key in (key for key in want if not key.endswith("_extra_state")):
        assert torch.allclose(found[key], want[key], rtol=1e-10, atol=1e-12), key


def test_a_checkpoint_of_a_loop_is_one_of_an_engine(tmp_path: Path):
    """`shardwise checkpoint inspect` and `export` read it; saves are numbered and pruned."""
    module = wrap("FULL_SHARD", Sum(), alone())
    optim = optimizer_of("AdamW", module)
    for step in range(4):
        module(rows(step), 1).sum().backward()
        optim.step()
        sw.save(module, tmp_path / "kept", optimizer=optim, keep=2)
    kept = sorted(path.name for path in (tmp_path / "kept").glob("step-*"))
    assert kept == ["step-000003", "step-000004"]
    contents = describe(tmp_path / "kept", deep=True)
    assert contents["parameters"] == sum(p.numel() for p in module.parameters())
    assert contents["scalars"]["loop"]["optimizer"] == "AdamW"
    assert export(tmp_path / "kept", tmp_path / "weights").tensors == 9
    assert sw.save(module, tmp_path / "kept", step=70).name == "step-000070"
    assert sw.load(sw.DDP(Sum(), alone()), tmp_path / "kept") == {}
    assert sw.load(module, tmp_path / "none", missing_ok=True) == {}


def pieces_refused(world: World) -> list[str]:
    """What refuses to take pieces for whole parameters, on a rank of two."""
    module = sw.FSDP(Sum(), world=world)
    optim = torch.optim.Adam(module.parameters())
    whole = torch.optim.Adam((plain := Sum()).parameters())
    plain(rows(0), 1).sum().backward()
    whole.step()
    optim.load_state_dict(whole.state_dict())
    module(rows(world.rank), 1).sum().backward()
    acts = [
        optim.step,
        lambda: (optim.state.clear(), optim.step(), optim.load_state_dict(whole.state_dict())),
        optim.state_dict,
        lambda: get_optimizer_state_dict(module, optim),
    ]
    said: list[str] = []
    for act in acts:
        with pytest.raises(InputError) as caught:
            act()
        said.append(str(caught.value))
    module.zero_grad()
    fresh = torch.optim.Adam(module.parameters())  # before any step of the program
    with pytest.raises(InputError):
        get_optimizer_state_dict(module, fresh)
    sw.unwrap(module)
    assert set(torch.optim.Adam(module.parameters()).state_dict()) == {"state", "param_groups"}
    return said


def test_pieces_are_not_taken_for_whole_parameters():
    """State dicts of an optimizer over pieces: an error that says sw.save, or sw.load."""
    for said in run_gloo(2, pieces_refused):
        assert ["of the whole parameter" in text for text in said] == [True, True, False, False]
        assert all("sw.load(module, folder, optimizer=optim)" in text for text in said[:2])
        assert all("sw.save(module, folder, optimizer=optim)" in text for text in said[2:])


# --- what does not fit --------------------------------------------------------------------------

#: With the wrapped module, its optimizer, and the folder of its checkpoint.
BAD: list[tuple[Callable[[Any], Any], str]] = [
    (lambda its: sw.save(Sum(), its.folder), "sw.save of a plain Sum"),
    (lambda its: sw.save(its.optim, its.folder), "sw.save of AdamW"),
    (
        lambda its: sw.save(its.module, its.folder, optimizer=sgd(Sum())),
        "parameters of another module",
    ),
    (
        lambda its: sw.load(its.module, its.folder, optimizer=sgd(its.module)),
        "of AdamW, for an optimizer of",
    ),
    (
        lambda its: sw.load(
            its.module, its.folder, optimizer=torch.optim.AdamW(its.module.parameters())
        ),
        "were not in one group",
    ),
    (lambda its: sw.load(engine("ddp fp64"), its.folder), "without an engine's state"),
    (
        lambda its: sw.save(engine("ddp"), its.folder, optimizer=its.optim),
        "of an engine with optimizer=",
    ),
    (
        lambda its: sw.load(sw.DDP(nn.Linear(2, 2).double(), alone()), its.folder),
        "the checkpoint does not have|which the model lacks",
    ),
]


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters())


def engine(plan: str) -> sw.Engine:
    return sw.parallelize(Sum(), plan, alone())


@pytest.mark.parametrize(("act", "text"), BAD)
def test_what_does_not_fit_is_one_paragraph(tmp_path: Path, act: Any, text: str):
    """And nothing is changed."""
    module = sw.DDP(Sum(), alone())
    optim = optimizer_of("AdamW", module)
    sw.save(module, tmp_path, optimizer=optim)
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(InputError, match=text) as caught:
        act(SimpleNamespace(module=module, optim=optim, folder=tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert all(map(torch.equal, before, module.parameters()))


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path):
    """An object in a state, or in a module's extra state."""
    module = sw.DDP(Sum(), alone())
    optim = optimizer_of("AdamW", module)
    optim.state[module.get_parameter("chain.2.weight")]["helper"] = {"of": [object()]}
    match = r"the optimizer's state of chain\.2\.weight, in which 'helper\.of\.0' is a object"
    with pytest.raises(InputError, match=match):
        sw.save(module, tmp_path, optimizer=optim)
    module.get_submodule("chain.0").get_extra_state = object
    with pytest.raises(InputError, match=r"the extra state of chain\.0 \(Counted\), in which"):
        sw.save(module, tmp_path)


def test_what_cannot_be_loaded_leaves_the_engine_alone(tmp_path: Path):
    """Another optimizer, more of the model, no engine: weights and states stay."""
    engine = engine_of(alone(), "fp64")
    save(tmp_path / "0", engine.boxes(), {"step": 1}, alone())
    every: list[tuple[int, dict[str, Any], str]] = [
        (0, {"optimizer": sw.SGD(lr=0.1)}, "saved by SGD, without states of AdamW"),
        (2, {"optimizer": sw.SGD(lr=0.1)}, "saved by SGD, without states of AdamW"),
        (2, {"optimizer": sw.SGD(lr=0.1, momentum=0.9)}, "exp_avg/0"),
        (1, {"model": nn.Sequential(*chain(), nn.Linear(6, 6))}, "which the model lacks"),
    ]
    for number, (count, options, _) in enumerate(every, start=1):
        other = engine_of(alone(), "fp64", **options)
        steps(other, 0, count)
        sw.save(other, tmp_path / str(number))
    before = [p.clone() for p in engine.model.parameters()]
    for number, text in enumerate(["without an engine's state", *(text for *_, text in every)]):
        with pytest.raises(InputError, match=text):
            sw.load(engine, tmp_path / str(number))
        assert engine.steps == 0 and not engine.optimizer.state
        assert all(map(torch.equal, before, engine.model.parameters()))


# --- inspect ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint by two ranks."""
    tensors = {
        "model/w": sample((4, 3), torch.float32),
        "model/b": sample((3,), torch.bfloat16),
        "optim/step/w": sample((), torch.float64),
    }
    held = [boxes_of(tensors, "flat", rank, 2) for rank in range(2)]
    scalars = {"step": 7, "engine": {"loss_scale": 2.0}, "plan": "dp2 zero3"}
    save_by_all(tmp_path / "run" / "checkpoints", held, scalars)
    return tmp_path / "run"


def inspected(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code, out, err = ended(capsys, "checkpoint", "inspect", *argv)
    return code, out + err


def test_inspect_shows_tensors_and_scalars(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Sums, each tensor with --all, one object with --json, though the files hold only zeros."""
    for path in folder.glob("checkpoints/*/*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    lines = inspected(capsys, str(folder))[1].splitlines()
    assert lines[0].endswith("saved by 2 ranks under the plan 'dp2 zero3' after step 7")
    assert lines[1] == "3 tensors, 15 parameters: 54 bytes of the model, 8 bytes of the optimizer"
    assert [line.split() for line in lines[2:5]] == [
        ["model", "1", "in", "bfloat16", "6", "bytes"],
        ["model", "1", "in", "float32", "48", "bytes"],
        ["optim/step", "1", "in", "float64", "8", "bytes"],
    ]
    lines = inspected(capsys, str(folder), "--all")[1].splitlines()
    assert [line.split() for line in lines[3:7]] == [
        ["model/b", "bfloat16", "3", "6", "bytes"],
        ["model/w", "float32", "4", "x", "3", "48", "bytes"],
        ["optim/step/w", "float64", "scalar", "8", "bytes"],
        ["in", "all", "62", "bytes"],
    ]
    assert json.loads("\n".join(lines[8:]))["engine"] == {"loss_scale": 2.0}
    said = json.loads(inspected(capsys, str(folder), "--json")[1])
    assert said["path"].endswith("step-000007") and (said["bytes"], said["ranks"]) == (62, 2)
    assert [[*tensor.values()] for tensor in said["tensors"]] == [
        ["model/b", [3], "bfloat16", 6, 2],
        ["model/w", [4, 3], "float32", 48, 2],
        ["optim/step/w", [], "float64", 8, 1],
    ]


def test_inspect_names_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]):
    """A file of tensors, though the metadata is whole."""
    for file in sorted((folder / "checkpoints" / "step-000007").glob("*.distcp")):
        content = file.read_bytes()
        for left, phrase in ((None, "it is not there"), (10, "it has 10 bytes")):
            file.unlink() if left is None else file.write_bytes(content[:left])
            code, said = inspected(capsys, str(folder))
            assert code == 2 and f"{file.name}', which is damaged ({phrase}" in said
        file.write_bytes(content)
