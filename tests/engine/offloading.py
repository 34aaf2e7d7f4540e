"""Training with offload, and what every kind of it must hold."""

from typing import Any

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.engine.state_dict import full_parameters
from tests.engine.cases import (
    Case,
    Run,
    Task,
    build,
    difference,
    expected_near,
    foreseen,
    oracle,
    share,
)
from tests.engine.tensors import sent


def trained(world: World, task: Task, case: Case) -> tuple[Run, list[Any]]:
    """The training, and of each step the gradients it used and what was sent and held.

    Gradients are this rank's pieces: offsets, sizes, values. Bytes held are of the device, the host
    and the disk; all bytes come with the prediction.
    """
    engine, theory, run, costs = build(world, task, case), foreseen(world, task, case), Run(), []
    for step in range(case.steps):
        own = share(task.batch(step), engine.data_rank, engine.data_ranks)
        metrics = engine.step(own)
        run.losses.append(metrics.loss)
        run.norms.append(metrics.grad_norm)
        told = theory.of(own)
        held = engine.memory(), engine.host_memory(), engine.disk_memory()
        memory = held, (told.memory, told.host_memory, told.disk_memory)
        costs.append(((sent(engine), told.in_step(step)), memory))
        boxes = [(b.name, b.offsets, b.sizes, b.tensor.clone()) for b in engine.gradients()]
        run.grads.append({"boxes": boxes})  # type: ignore[dict-item]
    if "pp" not in case.plan and "tp" not in case.plan:
        run.weights = full_parameters(engine.flats)
    return run, costs


def trained_as_one(run: Any, task: Task, case: Case) -> list[Any]:
    """What each rank of `run` (run_gloo or run_threads) trained; parity with one process holds."""
    results = run(Plan.parse(case.plan).size, trained, task, case)
    assert_parity(results, oracle(task, case), 1e-10)
    return results


def assert_parity(results: list[Any], wanted: Run, tolerance: float) -> None:
    """Losses, norms, every piece of a gradient, and weights are those of one process."""
    for run, _ in results:
        assert run.losses == expected_near(wanted.losses, tolerance)
        assert run.norms == expected_near(wanted.norms, tolerance)
        for found, grads in zip(run.grads, wanted.grads, strict=True):
            for name, offsets, sizes, piece in found["boxes"]:
                full = grads[name.removeprefix("grad/")]
                assert full is not None
                part = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
                error = (piece.to(full) - part).abs().max() if part.numel() else 0.0
                assert error <= tolerance * full.abs().max(), name
        for name, weight in run.weights.items():
            assert difference(weight, wanted.weights[name]) <= tolerance, name


def assert_costs(results: list[Any], *, on_disk: bool = False) -> None:
    """What was sent and held in each step is what was predicted from the plain model."""
    for _, costs in results:
        for (counted, predicted), (held, formula) in costs:
            assert counted == predicted
            assert held == formula
            device, host, disk = held
            assert device["gradients"] == device["optimizer"] == 0
            rests = disk if on_disk else host
            assert rests["gradients"] > 0 < rests["optimizer"]
            assert not on_disk or host["gradients"] == 0
