"""`offload:optim=0.7,disk=0.3`: units with states on the device, on the host and on a disk."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.offload import parse
from tests.engine.cases import (
    Case,
    Task,
    difference,
    expected_near,
    oracle,
    rows_task,
    settled,
)
from tests.engine.offloading import assert_parity, trained
from tests.engine.test_precision import overflowing
from tests.engine.test_zoo import DECAY, gated
from tests.engine.zoo import Gated
from tests.pool import run_threads

TASK = Task()
WORD = "offload:optim=0.7,disk=0.3"


def assert_three_tiers(results: list[Any], tiers: str = "device host disk") -> None:
    """Bytes sent and held are those predicted, and all of `tiers` have optimizer states."""
    for _, costs in results:
        for (counted, predicted), (held, formula) in costs:
            assert counted == predicted
            assert held == formula
            device, host, disk = held
            by_tier = {"device": device, "host": host, "disk": disk}
            assert all(by_tier[tier]["optimizer"] > 0 for tier in tiers.split())


@pytest.mark.parametrize("what", ["optim,disk=0.5", "optim=0.4,disk=0.4"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    ],
)
def test_two_tiers_and_other_optimizers(what: str, kind: Any, options: dict[str, Any]):
    """Host and disk, device and disk; momenta that a step makes, on the tier of each unit."""
    case = Case(f"dp2 zero2 fp64 offload:{what}", kind=kind, options=options)
    results = run_threads(2, trained, TASK, case)
    assert_parity(results, oracle(TASK, case), 1e-10)
    assert_three_tiers(results, "disk " + ("host" if "optim," in what else "device"))


def late(step: int) -> tuple[Tensor, Tensor]:
    """Rows that do not ask for the module `side` in the first step."""
    return gated(1 if step == 0 else 2)


@pytest.mark.parametrize("words", ["", "offload:optim", "offload:optim@disk"])
def test_a_first_gradient_beside_momenta(words: str):
    """One call of torch's SGD has parameters that have a momentum, and some that have none yet."""
    task = rows_task(lambda: settled(Gated()), late)
    case = Case(f"dp2 zero2 fp64 {words}", units=2**20, **DECAY["SGD"])
    wanted = oracle(task, case)
    assert [g["side.weight"] is None for g in wanted.grads] == [True, False, False]
    for run, _ in run_threads(2, trained, task, case):
        assert run.losses == expected_near(wanted.losses, 1e-10)
        for name, weight in wanted.weights.items():
            assert difference(run.weights[name], weight) <= 1e-10, name


def test_an_overflow_updates_no_tier():
    """All ranks leave the update out on every tier, halve the scale, and go on."""
    plain, offloaded = (
        run_threads(2, overflowing, f"dp2 zero2 fp16 {words}") for words in ("", WORD)
    )
    for log, other in zip(plain, offloaded, strict=True):
        assert other.skipped == [False, False, True, False, False, False]
        assert other.moved == [not skipped for skipped in other.skipped]
        assert (other.scales, other.losses) == (log.scales, log.losses)


def test_units_go_to_the_tiers_in_the_order_of_their_gradients():
    """The last units, whose gradients come first, go furthest; by whole units."""
    numels = [40, 10, 10, 10, 30]
    assert parse("optim=0.5,disk=0.3").tiers(numels) == ["device"] * 2 + ["host"] * 2 + ["disk"]
    assert parse("optim=0.5,disk=0.31").tiers(numels) == ["device"] * 2 + ["host"] + ["disk"] * 2
    assert parse("optim,disk=0.3").tiers(numels) == ["host"] * 4 + ["disk"]
    assert parse("optim=0.5").tiers(numels) == ["device"] * 2 + ["host"] * 3
    assert parse("optim=0.3,disk=0.3").tiers(numels) == ["device"] * 4 + ["disk"]
    assert str(parse("optim,disk=1")) == "optim@disk"
    assert str(parse("optim=0.9,disk=0.00001")) == "optim=0.9,disk=0.00001"


class Scaled(torch.nn.Module):
    """Twelve layers, and a parameter without dims in the last unit."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        for p in self.layers.parameters():
            torch.nn.init.normal_(p, std=0.2, generator=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 64] to [N, 64]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def scaled_engine(plan: str, folder: Path) -> sw.Engine:
    """With groups of the optimizer, of which each unit has members."""
    return sw.parallelize(
        Scaled().double(),
        f"fp64 {plan}",
        sw.init(),
        optimizer=sw.AdamW(lr=1e-2, groups={"*bias": {"weight_decay": 0.0}, "scale": {"lr": 0.1}}),
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=str(folder),
        least_unit_bytes=1,
    )


def steps_of(engine: sw.Engine, first: int, last: int) -> list[float]:
    """The losses of some steps."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [engine.step(rows * (k + 1)).loss for k in range(first, last)]


@pytest.mark.parametrize("words", ["offload:optim,disk=0.5", "offload:optim@disk"])
def test_both_threads_step_by_one_optimizer(words: str, tmp_path: Path):
    """Groups of the optimizer, stepped on the host and from the disk at once: no bit changes."""
    wanted = steps_of(scaled_engine("", tmp_path), 0, 8)
    for _ in range(3):
        assert steps_of(scaled_engine(words, tmp_path), 0, 8) == wanted


def test_a_parameter_without_dims_after_loading(tmp_path: Path):
    """Its states stay in host memory, so that a loaded run goes on as the other does."""
    words = "offload:optim@disk"
    engine = scaled_engine(words, tmp_path)
    steps_of(engine, 0, 2)
    sw.save(engine, tmp_path / "saved")
    again = scaled_engine(words, tmp_path)
    sw.load(again, tmp_path / "saved")
    assert steps_of(again, 2, 6) == steps_of(engine, 2, 6)


@pytest.mark.parametrize("what", ["optim,disk=0.5", "optim@disk", "param@disk"])
def test_full_weights_while_the_disk_writes(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`sw.full_state_dict` waits for writes that are under way."""
    write = os.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return write(*args)

    plain, engine = (scaled_engine(plan, tmp_path) for plan in ("", f"offload:{what}"))
    monkeypatch.setattr(os, "pwritev", slow)
    assert steps_of(plain, 0, 2) == steps_of(engine, 0, 2)
    wanted, found = (sw.full_state_dict(each) for each in (plain, engine))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_states_that_are_means_of_matrices_are_refused(tmp_path: Path):
    """Adafactor's rows and columns are not in a chunk of the flat parameter."""
    with pytest.raises(InputError, match="means of rows and columns"):
        sw.parallelize(
            Scaled(),
            WORD,
            sw.init(),
            optimizer=sw.Optim(torch.optim.Adafactor, lr=0.1),
            offload_folder=str(tmp_path),
        )
