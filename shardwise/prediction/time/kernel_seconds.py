"""Seconds of recorded operations on a device's roofline.

product        max(FLOPs / peak of its precision, bytes / memory bandwidth, launch)
others         max(bytes / memory bandwidth, launch)

On a device that is not asynchronous, a processor, the launch is added.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from shardwise.core.tools.tape import Operation
from shardwise.prediction.cluster import Cluster

K = TypeVar("K")
#: The words of plans and clusters for torch's types; the others compute no products.
PRECISIONS: Final = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def operation_s(operation: Operation, cluster: Cluster) -> float:
    """The time of one kernel."""
    work_s, launch_s = operation.moved_bytes / cluster.bytes_per_s, cluster.device.launch_s
    if flops := operation.done_flops:
        work_s = max(work_s, flops / cluster.flops_per_s(precision(operation), flops))
    return max(work_s, launch_s) if cluster.device.asynchronous else work_s + launch_s


def precision(operation: Operation) -> str:
    """The precision of a product."""
    return PRECISIONS.get(operation.dtype, operation.dtype)


def seconds_by(
    operations: Iterable[Operation], cluster: Cluster, key: Callable[[str], K]
) -> dict[str, defaultdict[K, float]]:
    """The seconds "forward" and "backward", by the `key` of each operation's module."""
    found = {phase: defaultdict[K, float](float) for phase in ("forward", "backward")}
    for each in operations:
        phase = "backward" if each.backward else "forward"
        found[phase][key(each.module)] += operation_s(each, cluster)
    return found
