"""`sw.search`: the best plan of a model for a number of ranks of a cluster."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.parameter import parameter_like
from shardwise.core.errors import InputError, bad
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import Blocks
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import integer
from shardwise.derive.search.plan_costs import DEPTHS
from shardwise.derive.search.result import PlanTask, SearchResult
from shardwise.derive.search.search import best_plans
from shardwise.derive.table import table_or_derived
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.predict import predict_rank
from shardwise.observe.dry_engine import dry_step, with_few_microbatches
from shardwise.observe.meta_pass import UNKNOWN
from shardwise.prediction.cluster import Cluster, cluster_of
from shardwise.prediction.prediction import DryStep, Prediction
from shardwise.techniques.expert.apply import shapes_of
from shardwise.techniques.pipeline.partition import calls_of, candidates, starts

#: The plans that are predicted.
COUNT: Final = 8
#: The plan whose precision and options all predictions share.
PLAIN: Final = Plan(precision="bf16")


class SearchedModel:
    """A model, and its predictions under the plans of a search."""

    def __init__(self, model: nn.Module, batch: Any, options: EngineOptions) -> None:
        self.model, self.batch, self.options = model, batch, options
        self.calls = cache(lambda: calls_of(model, options.objective))
        self.counts = cache(self._counts)
        self.blocks = blocks = equal_blocks(model)
        self.copy = cache(lambda n: shortened(model, blocks, n) if blocks and n else model)
        self.predicted = cache(self._predicted)
        self.tables = dict[tuple[int, int | None], Any]()

    def of(self, plan: Plan, rows: int, rank: int = 0, depth: int | None = None) -> Prediction:
        """That of a rank, with microbatches of `rows` rows, of a copy with `depth` blocks."""
        return self.predicted(plan, rows, depth).on(rank)

    def one_row(self, plan: Plan, depth: int | None) -> Prediction:
        """That of one row on the tensor and context axes of `plan` alone, recomputed like it."""
        axes = ("dp", 1), (TENSOR, plan.mesh.size_of(TENSOR))
        own = replace(PLAIN, axes=axes, context=plan.context, sp=plan.sp, recompute=plan.recompute)
        return self.of(own, 1, depth=depth)

    def _counts(self, stages: int) -> Counts:
        """The blocks, or else layers, of so many stages. Raises InputError for too few."""
        cuts = candidates(self.model, stages, self.calls())
        begin = [cuts.index(name) for name in starts(self.model, stages, None, self.calls())]
        return tuple(b - a for a, b in pairwise((0, *begin, len(cuts))))

    def _predicted(self, plan: Plan, rows: int, depth: int | None) -> Prediction:
        model = self.copy(depth)
        key = plan.mesh.size_of(TENSOR), depth
        if key not in self.tables:
            own = self.options.table, plan
            one, loss = (lambda: self._rows(1)), self.options.objective
            self.tables[key] = table_or_derived(*own, lambda: model, one, loss)
        options = replace(self.options, table=self.tables[key])
        found = predict_rank(model, plan, self._rows(rows * plan.microbatches), options)

        known = dict[tuple[Plan, int], DryStep]()

        def step_on(plan: Plan, rank: int, *, brief: bool = False) -> DryStep:
            """A step that is known shows what a brief one does."""
            if (plan, rank) in known:
                return known[plan, rank]
            few = with_few_microbatches(plan, rank)
            batch, how = self._rows(rows * few.microbatches), {"parts": False, "brief": brief}
            step = dry_step(model, few, batch, options, rank, whole=plan, **how)
            return step if brief else known.setdefault((plan, rank), step)

        return replace(found, dry=cache(step_on))

    def _rows(self, rows: int) -> Any:
        return tree_map_only(Tensor, lambda x: x[:1].repeat(rows, *[1] * (x.dim() - 1)), self.batch)


def search(
    model: nn.Module,
    cluster: Cluster | str | Path,
    ranks: int,
    batch: Any,
    *,
    rows: int | None = None,
    loss: Loss | None = None,
    options: EngineOptions | None = None,
    count: int = COUNT,
) -> SearchResult:
    """The best plans for a step of `rows` rows on `ranks` devices of a cluster.

    `model` may be on the meta device. `cluster` is a `Cluster`, the name of a preset or a file.
    `batch` is a batch of at least one row, in dim 0 of its tensors; its values are not read. `rows`
    counts those of a step on all ranks; None: those of `batch`. `loss` is that of `parallelize`;
    `options`, if given, has it and all other options. `count` plans that fit are predicted, those
    with the shortest steps by an estimate (docs/how-to/choose-a-plan.md).

    Raises:
        InputError: for a wrong cluster, ranks that do not fill its hosts, a batch that no plan
            divides, and a model that cannot be predicted under any plan.
    """
    cluster = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    integer("ranks", ranks, 1, cluster.devices_per_host)
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    rows = len(leaves[0]) if rows is None else rows
    integer("rows", rows, 1, ranks)
    options = options or EngineOptions(loss=loss, clip=1.0, kernels="cuda")
    predicted = SearchedModel(model, batch, options)
    texts = (x.shape[1] for x in leaves if x.dim() == 2 and not x.is_floating_point())
    try:
        assert predicted.one_row(PLAIN, DEPTHS[0] if predicted.blocks else None).dry_step
    except InputError:
        raise
    except UNKNOWN as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        given = f"a {type(model).__name__} whose pass cannot be recorded ({why})"
        allowed = "a model and a loss that run in one process on a batch of one row"
        raise bad(given, allowed, "loss(model, batch), as it runs in one process") from error
    sizes = [layer.experts for layer in shapes_of(model).values()]
    task = PlanTask(ranks, cluster.devices_per_host, rows, next(texts, 0), min(sizes, default=1))
    return best_plans(task, predicted, cluster, count)


# --- the list of equal blocks of a deep model, and copies of it with few of them ------------------

#: Models with fewer blocks are recorded in full.
LEAST: Final = 8


def equal_blocks(model: nn.Module) -> Blocks | None:
    """The only list of at least LEAST blocks of a model, if all are equal; None otherwise."""
    lists = [
        Blocks(name, len(module))
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList) and len(module) >= LEAST
    ]
    if len(lists) != 1:
        return None
    name, count = lists[0]
    first, *others = model.get_submodule(name).children()
    inside = [*model.named_parameters(remove_duplicate=False)]
    inside += [*model.named_modules(remove_duplicate=False)]
    times = Counter(id(each) for _, each in inside)
    shared = any(times[id(each)] > 1 for key, each in inside if key.startswith(f"{name}."))
    if shared or len(others) != count - 1:
        return None
    own = list(_described(first, f"{name}.0"))
    for k, block in enumerate(others, 1):
        for one, other in zip(own, _described(block, f"{name}.{k}"), strict=False):
            if one != other and (one[:2], one[2], other[2]) != (other[:2], 0, k):
                return None
    return lists[0]


def _described(block: nn.Module, name: str) -> Iterator[tuple[str, str, Any]]:
    """What a block's forward may depend on: classes, shapes, and plain attributes."""
    for key, module in block.named_modules():
        yield key, "class", type(module)
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for tensor, x in own:
            yield key, tensor, (x.shape, x.dtype, x.requires_grad)
        for attribute, value in vars(module).items():
            if isinstance(value, str):
                yield key, attribute, value.replace(name, "")
            elif value is None or isinstance(value, bool | int | float | tuple):
                yield key, attribute, value


def shortened(model: nn.Module, blocks: Blocks, depth: int) -> nn.Module:
    """A copy of a model on meta with its first `depth` blocks."""
    whole: Any = model.get_submodule(blocks.name)
    few = whole[:depth]
    dropped = {id(p) for block in whole[depth:] for p in block.parameters()}
    memo: dict[int, Any] = {
        id(p): parameter_like(p, torch.empty_like(p, device="meta"))
        for p in model.parameters()
        if id(p) not in dropped
    }
    memo[id(whole)] = copy.deepcopy(few, memo)
    return copy.deepcopy(model, memo)
