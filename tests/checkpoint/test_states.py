"""What is no tensor, and what does not exist yet, in checkpoints of engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.own import Own
from tests.checkpoint.test_plain_loops import Sum
from tests.engine.loops import rows
from tests.pool import run_gloo

OWN = sw.Optim(Own, lr=0.02, groups={"*.bias": {"lr": 0.01, "betas": (0.7, 0.2)}})
ADAM = sw.AdamW(lr=0.02, weight_decay=0.1)


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"], batch["late"]).square().mean()


def go(
    world: World, folder: str, plan: str, optimizer: Any, steps: range, load: bool
) -> dict[str, Any]:
    """Steps of an engine, from the folder's checkpoint if `load`, else to one."""
    engine = sw.parallelize(
        Sum(), f"{plan} fp64", world, optimizer=optimizer, loss=loss, least_unit_bytes=0
    )
    if load:
        sw.load(engine, folder)
    for step in steps:
        x = torch.cat([rows(2 * step, 0), rows(2 * step, 1)])[:4]
        part = x.tensor_split(engine.data_ranks)[engine.data_rank]
        engine.step({"x": part, "late": int(step >= 3)})
    engine.wait()  # parameters are gathered, states are of pieces
    if not load:
        sw.save(engine, folder)
    return sw.full_state_dict(engine)


def run(plan: str, *args: Any) -> dict[str, Any]:
    ranks, (folder, *more) = sw.Plan.parse(plan).size, args
    if ranks == 1:
        return go(alone(), folder, plan, *more)
    return run_gloo(ranks, go, folder, plan, *more)[0]


PAIRS = [("dp2 zero3", "pp2 gpipe:1"), ("pp2 gpipe:1", "dp2 zero2")]


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("optimizer", [OWN, ADAM], ids=["Own", "AdamW"])
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_is_saved_goes_on(tmp_path: Path, at: int, optimizer: Any, here: str, there: str):
    """Numbers, lists and counts of an optimizer, and modules' extra state, under another plan.

    Also from before the first step, and where a layer has had no gradient yet.
    """
    run(here, str(tmp_path), optimizer, range(at), False)
    found = run(there, str(tmp_path), optimizer, range(at, 6), True)
    want = run("dp1", str(tmp_path / "straight"), optimizer, range(6), False)
    assert found.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-12), key
    counts = [state["chain.0._extra_state"]["calls"] for state in (found, want)]
    assert counts[0] == counts[1] > 0


def test_a_state_goes_into_an_engine_that_has_trained(tmp_path: Path):
    """Loading a checkpoint from before the first step begins afresh: no state is left over."""
    engine = sw.parallelize(Sum(), "fp64", alone(), optimizer=ADAM, loss=loss)
    sw.save(engine, tmp_path)
    batch = {"x": rows(0, 0), "late": 1}
    first = [engine.step(batch).loss for _ in range(2)]
    sw.load(engine, tmp_path)
    assert not engine.optimizer.state
    vars(engine.model.get_submodule("chain.0"))["calls"] = 0
    assert [engine.step(batch).loss for _ in range(2)] == first


@pytest.mark.parametrize("steps", [0, 2])
def test_another_class_of_optimizer_is_refused(tmp_path: Path, steps: int):
    """One without states cannot give any, and one with other states has not these."""
    for first, then, text in (
        (sw.SGD(lr=0.1), ADAM, "saved by SGD, without states of AdamW"),
        (sw.SGD(lr=0.1, momentum=0.9), ADAM, "exp_avg/chain" if steps else "saved by SGD"),
    ):
        folder = tmp_path / str(len(text))
        go(alone(), str(folder), "dp1", first, range(steps), False)
        engine = sw.parallelize(Sum(), "fp64", alone(), optimizer=then, loss=loss)
        with pytest.raises(InputError, match=text):
            sw.load(engine, folder)
        assert not engine.optimizer.state and engine.steps == 0
