"""Sabotages of tensor and sequence parallelism, and of cut logits."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transport import Pending
from shardwise.core.layouts.uneven import Cut
from shardwise.engine import cut as layout_file
from shardwise.engine.optimizer import optimizer as optimizer_file
from shardwise.kernels import cross_entropy as loss_file
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor import linear as tensor_file
from shardwise.techniques.tensor.linear import InputGradient, Stream, _Leave
from shardwise.techniques.tensor.sequence import _Bias
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing


def rows_not_summed(patch: Patch) -> None:
    patch.setattr(Stream, "sum", lambda _, y, *__: y)


def columns_not_summed_backward(patch: Patch) -> None:
    def begin(entry: InputGradient) -> None:
        grad = entry.grad
        assert grad is not None
        entry.pending = Pending([lambda: grad])

    patch.setattr(InputGradient, "begin", begin)


def one_reader_forgotten(patch: Patch) -> None:
    """Queries, keys and values read one input: of their gradients the last one is dropped."""

    def add(real: Any, entry: InputGradient, grad: Tensor, weight: Tensor) -> Tensor | None:
        last = entry.grad is not None and entry.waiting == 1
        return real(entry, grad * 0.0 if last else grad, weight)

    around(patch, InputGradient, "add", add)


def bias_added_by_every_rank(patch: Patch) -> None:
    patch.setattr(_Bias, "remove", nothing)


def _cut_of(patch: Patch, act: Any) -> None:
    def embed(real: Any, module: Any, axis: Any, cut: Cut, finish: Any) -> None:
        real(
            module, axis, replace(cut, ranges=tuple(act(a, b) for ((a, b),) in cut.ranges)), finish
        )

    around(patch, tensor_parallel.embedding, "embed", embed)


def vocabulary_off_by_one(patch: Patch) -> None:
    _cut_of(patch, lambda a, b: ((a + 1, b + 1),))


def a_row_missing(patch: Patch) -> None:
    _cut_of(patch, lambda a, b: ((a, b - 1),))


def words_of_other_ranks_not_cleared(patch: Patch) -> None:
    def clear(real: Any, x: Tensor, mask: Tensor, value: float) -> Tensor:
        return x if mask.shape[-1:] == (1,) else real(x, mask, value)

    around(patch, Tensor, "masked_fill_", clear)


def exps_not_summed(patch: Patch) -> None:
    def reduce(real: Any, x: Tensor, axis: Any, op: str = "sum") -> Tensor:
        return x if op == "sum" else real(x, axis, op)

    around(patch, loss_file, "all_reduce", reduce)


def targets_off_by_one(patch: Patch) -> None:
    around(patch, loss_file, "known_classes", lambda real, *args: (real(*args) + 1) % args[2])


def heads_of_the_other_rank(patch: Patch) -> None:
    """Each rank begins with the part of the weights that the next one should have."""

    def part(real: Any, whole: Tensor, cut: Cut, rank: int) -> Tensor:
        alike = {cut.size(each) for each in range(cut.ranks)}
        return real(whole, cut, (rank + 1) % cut.ranks if len(alike) == 1 else rank)

    around(patch, layout_file, "part", part)


def sequence_not_gathered_backward(patch: Patch) -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([grad] * ctx.axis.size, grad.dim() - 2), None, None

    patch.setattr(_Leave, "backward", staticmethod(backward))


def norms_not_summed_over_shards(patch: Patch) -> None:
    patch.setattr(FlatGradient, "begin_further", nothing)


def a_shard_of_another_rank(patch: Patch) -> None:
    def gather(real: Any, x: Tensor, axis: Any, dim: int) -> Tensor:
        return torch.cat(real(x, axis, dim).chunk(axis.size, dim)[::-1], dim)

    around(patch, tensor_file, "all_gather_along", gather)


def equal_copies_counted_by_every_rank(patch: Patch) -> None:
    patch.setattr(optimizer_file, "counts", lambda _: True)


MUTATIONS = (
    Mutation("rows not summed", "tp2", "error", rows_not_summed, "gpt"),
    Mutation("columns not summed backward", "tp2", "error", columns_not_summed_backward, "gpt"),
    Mutation("one reader's gradient forgotten", "tp2", "parity", one_reader_forgotten, "gpt"),
    Mutation("a bias added by every rank", "tp2", "parity", bias_added_by_every_rank),
    Mutation("the vocabulary off by one", "tp2", "parity", vocabulary_off_by_one, "gpt"),
    Mutation("a row of the embedding missing", "tp2", "parity", a_row_missing, "gpt"),
    Mutation(
        "rows of words that are elsewhere", "tp2", "parity", words_of_other_ranks_not_cleared, "gpt"
    ),
    Mutation("softmax over a rank's own words", "tp2", "error", exps_not_summed, "gpt"),
    Mutation("targets off by one", "tp2", "parity", targets_off_by_one, "gpt"),
    Mutation("the heads of the next rank", "tp2", "parity", heads_of_the_other_rank, "gpt"),
    Mutation(
        "a sequence not gathered backward",
        "tp2 sp",
        "parity",
        sequence_not_gathered_backward,
        "gpt",
    ),
    Mutation(
        "norms not summed over shards", "tp2 sp", "error", norms_not_summed_over_shards, "gpt"
    ),
    Mutation("shards in another order", "tp2 sp", "parity", a_shard_of_another_rank, "gpt"),
    Mutation(
        "equal copies in the norm twice", "tp2", "parity", equal_copies_counted_by_every_rank, "gpt"
    ),
)
