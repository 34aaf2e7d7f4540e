"""Batches: their rows, ranks and microbatches without any, what is no batch."""

import math
from collections import UserDict
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.engine.batch import filled, on_device, rows, split, widened
from tests.engine.cases import HYBRID, ROWS, Case, Task, build, text, vectors
from tests.engine.tensors import ADAMW, equals_one, mine
from tests.engine.zoo import make
from tests.pool import run_threads


def few_tokens(step: int) -> dict[str, Tensor]:
    """Eight rows, of which the last two have one token, and the two before them none at all."""
    batch = text(step, rows=8)
    batch["targets"][4:] = -100
    batch["targets"][7, step] = 5
    return batch


def hostile(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose value and gradient on a stand-in of zeros are not numbers."""
    x, y = batch
    return functional.mse_loss(model(x / x.abs().sum(1, keepdim=True)), y)


def class_weights(batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.linspace(0.001, 0.03, batch[1].shape[1], dtype=torch.float64)


def by_class(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y.argmax(1), class_weights(batch))


def weight_of(batch: tuple[Tensor, Tensor]) -> float:
    """Of a batch: below 1 in all."""
    return class_weights(batch)[batch[1].argmax(1)].sum().item()


UNEVEN = {
    "class weights": Task(partial(make, "sequential"), vectors, by_class, weight_of),
    "ranks without rows": Task(batch=partial(text, rows=2)),
    "ranks without tokens": Task(batch=few_tokens),
    "not a number on a stand-in": Task(
        partial(make, "sequential"), partial(vectors, rows=3), hostile, None
    ),
}


FEW = [f"{HYBRID[1]} accumulate:2", *(f"dp4 {row}" for row in ROWS), f"{HYBRID[1]} accumulate:4"]


@pytest.mark.crossed
@pytest.mark.cases(2)
@pytest.mark.parametrize("task", UNEVEN)
@pytest.mark.parametrize("plan", FEW)
def test_ranks_that_run_out_of_data_take_part_with_weight_zero(plan, task):
    """Fewer rows than ranks or microbatches, or none that count: the global batch's mean."""
    equals_one(run_threads, UNEVEN[task], Case(f"{plan} fp64", clip=0.5))


def nothing_at_all(world: World, plan: str) -> None:
    """A step in whose global batch no token counts, between two ordinary ones."""
    engine = build(world, Task(), Case(plan))
    for step in range(3):
        batch = text(step, rows=4)
        batch["targets"][: 4 * (step == 1)] = -100
        before = [flat.shard.clone() for flat in engine.flats]
        metrics = engine.step(mine(engine, batch))
        stays = all(torch.equal(a, f.shard) for a, f in zip(before, engine.flats, strict=True))
        assert stays == (metrics.loss == metrics.tokens == 0) == (step == 1)
        assert math.isfinite(metrics.loss)


@pytest.mark.parametrize("plan", ["dp2 fp64", "dp2 zero3 fp64 accumulate:2"])
def test_a_batch_without_any_token_changes_nothing(plan):
    """Its loss is 0 over 0 tokens, the weights stay, and the next step goes on."""
    run_threads(2, nothing_at_all, plan)


def test_a_batch_is_split_into_parts_that_differ_by_a_row_at_most():
    """Tensors, arrays and texts along dim 0; values without rows go to every part."""
    batch: dict[str, Any] = {"a": torch.arange(5), "b": torch.tensor(7.0), "c": "text"}
    batch |= {"texts": list("abcde"), "array": np.arange(5)}
    for part, own in zip(split(batch, 3), ([0, 1], [2, 3], [4]), strict=True):
        assert part["a"].tolist() == part["array"].tolist() == own
        assert part["texts"] == ["abcde"[row] for row in own]
        assert (part["b"], part["c"]) == (7.0, "text")
    assert [rows(part) for part in split(torch.ones(2, 3), 4)] == [1, 1, 0, 0]
    with pytest.raises(InputError, match="a sparse or nested tensor under 1f1b:2"):
        split(torch.eye(4).to_sparse(), 2, "1f1b:2")
    with pytest.raises(InputError, match=r"a list of 5 numbers at batch\['n'\], beside 5 rows"):
        split(batch | {"n": [1, 2, 3, 4, 5]}, 2)


def test_a_stand_in_has_the_shape_of_what_it_stands_for():
    """Zeros of its dtypes and widths. Floats become wider, never narrower; whole numbers stay."""
    batch = {"a": torch.ones(0, 4, dtype=torch.int64), "b": torch.ones(0), "c": torch.tensor(2.0)}
    stand_in = filled(batch)
    assert stand_in["a"].shape == (2, 4) and stand_in["a"].dtype == torch.int64
    assert stand_in["b"].tolist() == [0.0, 0.0] and stand_in["c"] is batch["c"]
    wide, same = (widened(batch, x, nn.Linear(4, 4)) for x in (torch.float64, torch.bfloat16))
    assert wide["b"].dtype == torch.float64 and wide["a"].dtype == torch.int64
    assert same["b"] is batch["b"]


class Pair(NamedTuple):
    first: Any
    second: Any


BOXES = [{"boxes": torch.ones(n, 4)} for n in range(3)]

COUNTED: dict[str, tuple[Any, int]] = {
    "fields": ({"ids": torch.ones(4, 5), "mask": torch.ones(4), "epoch": torch.tensor(1)}, 4),
    "fields in a list": ([torch.ones(4, 5), torch.ones(4, 5)], 4),
    "keys": ({"past": ((torch.ones(4, 1), torch.ones(4, 2)),) * 3, "x": torch.ones(4)}, 4),
    "no rows": ({"positions": torch.ones(3, 0, 5), "ids": torch.ones(0, 5)}, 0),
    "a dict that is none": (UserDict(ids=torch.ones(4, 5), mask=torch.ones(4)), 4),
    "a namespace in a dataclass": (Pair(SimpleNamespace(ids=torch.ones(4, 5)), "text"), 4),
    "a cache": ((SimpleNamespace(layers=[torch.ones(4, 1)]), torch.ones(4)), 4),
}


@pytest.mark.parametrize("what", COUNTED)
def test_rows_are_dim_0_of_all_tensors(what: str):
    """In any container or object, which is split as it is counted; no tensor decides alone."""
    batch, count = COUNTED[what]
    parts = split(batch, 3)
    assert rows(batch) == count == sum(map(rows, parts))
    assert {type(part) for part in parts} == {type(batch)}
    assert rows(on_device(batch, torch.device("meta"))) == count == rows(batch)


UNCERTAIN: dict[str, tuple[Any, str]] = {
    "positions": (
        {"positions": torch.ones(3, 4, 5), "ids": torch.ones(4, 5)},
        r"batch\['positions'\] of shape \[3, 4, 5\], batch\['ids'\] of shape \[4, 5\].*rows=",
    ),
    "an optional tensor": ({"spans": torch.ones(0, 3), "ids": torch.ones(2, 5)}, "batch.'spans'"),
    "rows of x and y": ([(torch.ones(7), torch.tensor(1.0))] * 2, "rows=len for a list of samples"),
    "images and targets": (([torch.ones(3, 4, 5)], BOXES[2:]), r"batch\[0\]\[0\] of"),
    "packed": ([pack_sequence([torch.ones(3), torch.ones(2)]), torch.ones(2)], "batch_sizes"),
}


@pytest.mark.parametrize("what", UNCERTAIN)
def test_a_batch_whose_rows_are_not_certain_is_refused(what: str):
    """The error names the tensors and says what to write; with `rows=` it is counted."""
    batch, said = UNCERTAIN[what]
    with pytest.raises(InputError, match=f"(?s){said}"):
        rows(batch)
    assert rows(batch, lambda _: 4) == 4
    with pytest.raises(InputError, match="under accumulate:2"):
        split(batch, 2, count=lambda _: 4)


def test_lists_of_samples_are_split_where_rows_counts_them():
    """By sample, at any depth; a microbatch without any gets zeros like another's sample."""
    samples = [(torch.full((7,), float(n)), n) for n in range(3)]
    assert [[n for _, n in part] for part in split(samples, 2, count=len)] == [[0, 1], [2]]
    *_, last = split(samples, 4, count=len)
    assert rows(last, len) == 0 and not filled(last, len)[0][0].any()
    images = {"x": [torch.ones(3, 4, 5)] * 3, "y": (BOXES,), "z": torch.ones(3)}
    for part, n in zip(split(images, 2, count=lambda b: len(b["x"])), (2, 1), strict=True):
        assert (len(part["x"]), len(part["y"][0]), len(part["z"])) == (n, n, n)
    fields = [torch.ones(2, 5), torch.ones(2)]  # as many as rows
    assert [x.shape for x in split(fields, 2, count=lambda b: len(b[0]))[0]] == [(1, 5), (1,)]


def of_images(model: nn.Module, batch: Any) -> Tensor:
    images = batch["images"] if isinstance(batch, dict) else batch
    return torch.stack([model(x.mean((1, 2))) for x in images]).square().mean()


def first_step(world: World, batches: list[Any], plan: str = "dp2", **options: Any) -> str:
    engine = sw.parallelize(nn.Linear(3, 2), plan, world, loss=of_images, **options)
    try:
        return f"{engine.step(batches[world.rank]).tokens} tokens"
    except InputError as error:
        return str(error)


def test_the_first_step_refuses_on_all_ranks_what_one_rank_refuses():
    """A batch whose rows are certain on the other rank only."""
    image = torch.ones(3, 4, 5)
    found = run_threads(2, first_step, [{"images": [image]}, {"images": image[:2], "x": image}])
    assert "a batch of 1 other data ranks" in found[0] and "batch['x']" in found[1]
    found = run_threads(2, partial(first_step, rows=len), [[image] * 3, [image]])
    assert found == ["4 tokens"] * 2


def passes(world: World, batches: list[Any]) -> None:
    wrapped = sw.FSDP(nn.Linear(5, 2), world=world)
    for _ in range(2):
        wrapped(input=batches[world.rank]["images"]).sum().backward()


@pytest.mark.parametrize("run", [first_step, passes])
def test_equal_shares_of_all_data_ranks_are_reported_once(run: Any, capfd):
    """No sampler: rank 0 says so; different rows are no mistake."""
    for shares, lines in (([1.0, 1.0], 1), ([1.0, 2.0], 0)):
        run_threads(2, run, [{"images": torch.full((2, 3, 4, 5), x)} for x in shares])
        assert capfd.readouterr().err.count("have the same rows in the first step") == lines


def test_a_rank_with_fewer_rows_than_microbatches_is_named(capfd):
    """If all data ranks have too few, rank 0 alone says so."""
    for rows_of_first, rank in ((2, 1), (1, 0)):
        shares = [{"images": torch.rand(n, 3, 4, 5)} for n in (rows_of_first, 1)]
        run_threads(2, first_step, shares, "dp2 accumulate:2")
        said = capfd.readouterr().err
        assert said.count("fewer than its") == 1
        assert f"data rank {rank} has 1 rows, fewer than its 2 microbatches" in said


#: Rows of each step's global batch, and how many in a hundred of their targets count.
STEPS = ((9, 80), (13, 25), (8, 95), (11, 60))


def changing(step: int) -> dict[str, Tensor]:
    """Rows and masks that change; no number of tokens is a power of two."""
    rows, percent = STEPS[step]
    batch, own = text(step, rows=rows), torch.Generator().manual_seed(70 + step)
    masked = torch.rand(batch["targets"].shape, generator=own) >= percent / 100
    return batch | {"targets": batch["targets"].masked_fill(masked, -100)}


def in_fp32(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["inputs"]).float()
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


@pytest.mark.cases(3)
@pytest.mark.parametrize("clip", [0.1, None])
@pytest.mark.parametrize("plan", ["dp2", "dp2 zero3 accumulate:2", "pp2 1f1b:4", HYBRID[2]])
def test_a_loss_in_fp32_is_rounded_as_in_one_process(plan: str, clip: float | None):
    """To the digits of fp32, if ranks have unequal numbers of tokens, which change in each step."""
    case = Case(f"{plan} fp64", clip=clip, steps=4, **ADAMW)
    equals_one(run_threads, Task(batch=changing, loss=in_fp32), case, 1e-6)


def epochs(world: World, plan: str, resumed: dict[str, Any] | None, stops: int) -> Any:
    """The global batches of two epochs of ten samples, as far as batch `stops`, and the state."""
    model = nn.Linear(1, 1, dtype=torch.float64)
    engine = sw.parallelize(model, f"{plan} fp64", world, optimizer=sw.SGD(lr=0.0))
    data = [(torch.tensor([float(i)]), i) for i in range(10)]
    loader, seen = sw.Loader(data, engine, 4, seed=3, drop_last=False), list[list[int]]()
    if resumed is None:
        next(iter(loader))  # a batch that is looked at is not missing in the epoch
    else:
        loader.load_state_dict(resumed)
    while loader.epoch < 2 and len(seen) < stops:
        for x, number in loader:
            assert x[:, 0].tolist() == number.tolist()
            seen.append(engine.gather({"numbers": number})["numbers"].tolist())
            if len(seen) == stops:
                break
    return seen, loader.state_dict()


def test_a_loader_resumes_within_an_epoch_on_other_ranks():
    """The same global batches, the last of two rows for three ranks; each epoch has each sample."""
    whole, _ = run_threads(3, epochs, "dp3", None, 99)[2]
    assert list(map(len, whole)) == [4, 4, 2] * 2
    assert [sorted(chain(*whole[i : i + 3])) for i in (0, 3)] == [list(range(10))] * 2
    assert whole[:3] != whole[3:]
    (first, state), *_ = run_threads(2, epochs, "dp2", None, 2)
    for ranks, plan in ((4, "dp2 cp2"), (3, "dp3")):  # one of three has no row of its first batch
        (rest, _), *_ = run_threads(ranks, epochs, plan, state, 99)
        assert first + rest == whole
