"""The global batches of a proof, how they are divided, and the loads of experts.

    rows of the global batch    0 1 2 | 3 4        5 rows on 2 data ranks
                                0 1 2 3 |          4 rows on 2 data ranks, one of them idle

The first ranks have one row more if the rows are uneven; idle ranks, the last ones, have none.

Batches of tokens are ragged: a quarter of the targets does not count, so that rows have different
numbers of tokens; with every other seed they are a position shorter; and on a tensor axis they have
the first and the last word of each rank's part of the vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from shardwise.comm.move import part
from shardwise.core.layouts.uneven import Counts, even
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import rows, split
from shardwise.engine.engine import Engine
from shardwise.models.trainable import Trainable
from shardwise.techniques.context.positions import cut_of
from shardwise.techniques.expert.apply import experts_in, layers_of
from shardwise.techniques.expert.routing import Routing
from shardwise.techniques.expert.stacked import experts_of, stacked_experts
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.oracle import Oracle

SEED: Final = 20260
#: Rows of a microbatch; in 16 bits, where more rows are needed, of all microbatches of a rank.
ROWS, ROWS_16 = 2, 8
#: The step, of every four, in which the last data rank has no rows.
IDLE_STEP: Final = 1
#: A target that losses of tokens ignore, and the fewest positions of a row of tokens.
IGNORED, SHORTEST = -100, 4
#: The rows of a small batch that shows which tensors of a batch hold token ids.
FEW_ROWS: Final = 8


@dataclass(frozen=True)
class Division:
    """The division of a step's batch among data ranks; the last `idle` have no rows."""

    ranks: int
    microbatches: int
    idle: int = 0

    @classmethod
    def of(cls, engine: Engine, step: int | None = None) -> "Division":
        """With a `step`, one data rank is idle in one of every four steps."""
        ranks = engine.data_ranks
        # if layers have a mesh of their own, each rank needs rows to exchange
        may_idle = ranks > 1 and not any(each.has_axes for each in engine.plan.layers)
        idle = step is not None and step % 4 == IDLE_STEP and may_idle
        return cls(ranks, engine.microbatches, int(idle))

    def sizes(self, count: int) -> list[int]:
        busy = torch.empty(count, device="meta").tensor_split(self.ranks - self.idle)
        return [*map(len, busy), *[0] * self.idle]

    def share(self, whole: Any, rank: int) -> Any:
        busy = self.ranks - self.idle
        if rank < busy:
            return split(whole, busy, f"{busy} data ranks")[rank]
        return pytree.tree_map_only(Tensor, lambda x: x[:0] if x.dim() else x, whole)

    def counts(self, whole: Any) -> list[Counts]:
        shares = [torch.empty(size, device="meta") for size in self.sizes(rows(whole))]
        by_rank = [[len(x) for x in share.tensor_split(self.microbatches)] for share in shares]
        return list(zip(*by_rank, strict=True))


def rows_of_step(plan: Plan, division: Division, step: int) -> int:
    """The rows of the global batch of a step; uneven in every second step."""
    short = plan.precision in ("bf16", "fp16")
    fewest = ROWS_16 if short else ROWS
    apart = plan.pipeline is None and not short and not any(each.has_axes for each in plan.layers)
    if step % 4 == IDLE_STEP and apart and division.microbatches > 1:
        return (division.ranks - division.idle) * (division.microbatches - 1)
    # a rank with one row would exchange which of its tensors have rows (layers/apply.py)
    least = ROWS + any(each.has_axes for each in plan.layers)
    each = max(least, fewest // division.microbatches)
    return each * (division.ranks - division.idle) * division.microbatches - (step % 2 == 0)


def ragged(trainable: Trainable, plan: Plan) -> Trainable:
    """The same model with ragged batches, if its batches are of tokens and some may be ignored."""
    leaves, spec = pytree.tree_flatten(trainable.make_batch(FEW_ROWS, SEED))
    targets = [k for k, x in enumerate(leaves) if _counts(trainable, leaves, spec, k, x)]
    if not targets:
        return trainable
    most = int(leaves[targets[0]].max())
    words = [k for k, x in enumerate(leaves) if _is_ids(x) and most // 2 < int(x.max())]
    ends, shapes = _ends(trainable.plain(), plan, most), {x.shape for x in leaves if _is_ids(x)}
    same_shape = len(shapes) == 1 and all(map(_is_ids, leaves))

    def make_batch(rows: int, seed: int) -> Any:
        """A batch of the model; its words are those at the ends of each rank's, and random ones."""
        made, spec = pytree.tree_flatten(trainable.make_batch(rows, seed))
        for k in words:
            made[k] = made[k].clone()
            few = ends[: made[k].shape[1] // 2]
            made[k][:, 1 : 1 + len(few)] = torch.tensor(few, dtype=made[k].dtype)
        for k in targets:
            made[k] = _with_ignored(made[k], seed, 1 + len(ends))
        if same_shape and seed % 2:
            made = [x[:, :-1].contiguous() for x in made]
        return pytree.tree_unflatten(made, spec)

    return replace(trainable, make_batch=make_batch)


def _is_ids(x: Any) -> bool:
    """Whether it may be a tensor of tokens, with a row for each row of the batch."""
    whole = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
    return whole and x.dim() == 2 and x.shape[1] >= SHORTEST


def _counts(
    trainable: Trainable, leaves: Sequence[Any], spec: pytree.TreeSpec, place: int, x: Any
) -> bool:
    """Whether the leaf at `place` has the targets: without it no token is left."""
    if trainable.tokens is None or not _is_ids(x):
        return False
    none = [*leaves[:place], torch.full_like(x, IGNORED), *leaves[place + 1 :]]
    before, after = (pytree.tree_unflatten(one, spec) for one in (list(leaves), none))
    return trainable.tokens(after) == 0 < trainable.tokens(before)


def _ends(model: nn.Module, plan: Plan, most: int) -> list[int]:
    """The first and last word of each rank's part of the vocabulary; none for labels."""
    ranks = plan.tensor_degrees[-1]
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabulary = min((size for size in sizes if size > most), default=0)
    if ranks == 1 or not 0 < 3 * vocabulary <= 4 * most:
        return []
    parts = even(0, vocabulary, ranks).ranges
    return [word for ((first, last),) in parts for word in (first, last - 1) if word > 0]


def _with_ignored(targets_BT: Tensor, seed: int, first: int) -> Tensor:
    """Ignore a quarter of the targets, from the position `first` to the last but two."""
    own = torch.Generator().manual_seed(seed)
    ignored = torch.rand(targets_BT.shape, generator=own) < 1 / 4
    ignored[:, :first] = ignored[:, -2:] = False
    return targets_BT.masked_fill(ignored, IGNORED)


# --- the loads of experts, as one process routes the tokens of a batch ----------------------------
#
# The predicted bytes of experts come from these loads, never from the routing of the ranks.

ByRank = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Loads:
    """What the experts compute of one microbatch.

    choices  by layer: [R][E], how many choices of each data rank each expert computes
    shards   of stacked layers under `sp`: the same by tensor rank, of its shard of the sequence
    """

    choices: Mapping[str, ByRank]
    shards: Mapping[str, tuple[ByRank, ...]] = field(default_factory=dict[str, tuple[ByRank, ...]])

    def on(self, layer: str, tensor_rank: int) -> ByRank:
        shards = self.shards.get(layer)
        return self.choices[layer] if shards is None else shards[tensor_rank]


class Choices:
    """The choices of experts for each token in the last training step of `model` in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}  # by layer: [N, E] of each microbatch
        self.evaluated: dict[str, list[Tensor]] = {}  # the same, of evaluations
        for name, layer in layers_of(model).items():
            layer.place = replace(
                layer.place, on_routing=partial(self._see, name, layer.gate.experts)
            )
        self.by_shard = frozenset(stacked_experts(model))  # under sp
        for name, module in stacked_experts(model).items():
            module.register_forward_pre_hook(partial(self._see_stacked, name))

    def _see(self, name: str, experts: int, routing: Routing) -> None:
        computed = (routing.positions >= 0).unsqueeze(-1)
        self._add(name, functional.one_hot(routing.experts, experts) * computed)

    def _see_stacked(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._add(name, functional.one_hot(args[1], experts_of(module)))

    def _add(self, name: str, choices_NKE: Tensor) -> None:
        seen = self.seen if torch.is_grad_enabled() else self.evaluated
        seen.setdefault(name, []).append(choices_NKE.sum(1).cpu())

    def loads(
        self, batch: Any, plan: Plan, division: Division | None = None, *, trained: bool = True
    ) -> tuple[Loads, ...]:
        """The loads of each microbatch on the ranks of `plan`, in training or in evaluation."""
        division = division or Division(plan.shares, plan.microbatches)
        seen = self.seen if trained else self.evaluated
        self.seen, self.evaluated = {}, {}
        if not seen:
            return ()
        by_shard = self.by_shard if plan.sp else ()
        found: list[Loads] = []
        made = 0  # one process makes no pass of a microbatch without rows
        for sizes in division.counts(batch):
            some = any(sizes)
            own = {name: passes[made] if some else passes[0][:0] for name, passes in seen.items()}
            found.append(_loads([*sizes], own, by_shard, plan))
            made += some
        return tuple(found)


def _loads(
    sizes: list[int], seen: Mapping[str, Tensor], by_shard: Collection[str], plan: Plan
) -> Loads:
    rows, tensor_ranks = sum(sizes), plan.mesh.size_of("tp")
    by_row = {
        name: found.view(rows, len(found) // max(1, rows), found.shape[-1])
        for name, found in seen.items()
    }
    cut = cut_of(next(iter(by_row.values())).shape[1], plan.context)
    own = {
        name: [part(found, cut.on(1), rank) for rank in range(plan.cp)]
        for name, found in by_row.items()
    }
    shards = {name: [_padded(x, tensor_ranks) for x in own[name]] for name in by_shard}
    return Loads(
        {name: _by_expert(parts, sizes) for name, parts in own.items()},
        {
            name: tuple(
                _by_expert([x[:, rank] for x in parts], sizes) for rank in range(tensor_ranks)
            )
            for name, parts in shards.items()
        },
    )


def _padded(choices_BTE: Tensor, ranks: int) -> Tensor:
    """The choices as [B, ranks, T / ranks, E], by the shards of the sequence on tensor ranks."""
    positions = choices_BTE.shape[1]
    size = -(-positions // ranks)
    whole = functional.pad(choices_BTE, (0, 0, 0, size * ranks - positions))
    return whole.unflatten(1, (ranks, size))


def _by_expert(parts: Sequence[Tensor], sizes: list[int]) -> ByRank:
    """The choices by data rank and expert. `parts` has the positions of each rank of `cp`."""
    by_share = zip(*(x.split(sizes) for x in parts), strict=True)
    return tuple(tuple(own.flatten(0, -2).sum(0).tolist()) for each in by_share for own in each)


class Routed:
    """The loads of each step of a run, from an oracle that trains on the same batches."""

    def __init__(self, oracle: Oracle | AsyncOracle, plan: Plan, clip: float | None = None) -> None:
        self.oracle, self.plan, self.clip = oracle, plan, clip
        self.choices = Choices(oracle.model)

    def finish(self) -> None:
        if isinstance(self.oracle, Oracle):
            self.oracle.finish()

    def step(self, batch: Any, seed: int) -> tuple[Loads, ...]:
        """Train the oracle on a global batch. Seeds twice: the run draws the same numbers next."""
        if not experts_in(self.oracle.model):
            return ()
        torch.manual_seed(seed)
        self.oracle.step(batch, self.clip)
        torch.manual_seed(seed)
        return self.choices.loads(batch, self.plan)
