"""`sw.search`: the best plan of a model for a number of ranks of a cluster.

Thousands of plans are predicted from few recorded passes (recorded_model.py).
"""

from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import integer
from shardwise.derive.recorded_model import PLAIN, RecordedModel
from shardwise.engine.options import EngineOptions, Loss
from shardwise.observe.meta_pass import UNKNOWN
from shardwise.prediction.cluster import Cluster, cluster_of
from shardwise.prediction.search.result import PlanTask, SearchResult
from shardwise.prediction.search.search import best_plans

#: The plans that are printed, and certain to be the best.
COUNT: Final = 10


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
    `options`, if given, has it and all other options. The first `count` plans of the result are the
    best of all that are considered (docs/how-to/choose-a-plan.md).

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
    recordings = RecordedModel(model, batch, options)
    texts = (x.shape[1] for x in leaves if x.dim() == 2 and not x.is_floating_point())
    try:
        one = recordings.recorded(PLAIN, 1).prediction
    except InputError:
        raise
    except UNKNOWN as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        given = f"a {type(model).__name__} whose pass cannot be recorded ({why})"
        allowed = "a model and a loss that run in one process on a batch of one row"
        raise bad(given, allowed, "loss(model, batch), as it runs in one process") from error
    sizes = [layer.experts for layer in one.spec.expert_layers.values()]
    task = PlanTask(ranks, cluster.devices_per_host, rows, next(texts, 0), min(sizes, default=1))
    return best_plans(task, recordings, cluster, count)
