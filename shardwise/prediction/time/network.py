"""The seconds of messages on links, and of kernels on the roofline of a device.

Collectives take the latency of their hops, and bytes over bandwidth:

    tp8 in hosts of 8      1 host,  8 ranks in it     NVLink
    dp8 of dp8 tp8         8 hosts, 1 rank in each    one network link
    dp64                   8 hosts, 8 ranks in each   rings enter a host by all of its 8 links

    ring          all_gather, reduce_scatter, broadcast       n - 1 hops
    tree          all_reduce between hosts                    2 log2(hosts) hops, a ring's bytes
    pairs         all_to_all, send                            one hop; bytes by where the peers are

The bytes are those that the ledger counts (core/layouts/layout.py).  A measured cluster has a
latency and a rate of each collective relative to these.

Operations take as long as the device's roofline says; on a device that is not asynchronous, a
processor, the launch is added:

product        max(FLOPs / peak of its precision, bytes / memory bandwidth, launch)
others         max(bytes / memory bandwidth, launch)
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from shardwise.core.plan.plan import Plan
from shardwise.core.tally import TIER, Key, Tally
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Operation


class AxisHosts(NamedTuple):
    """The hosts that the ranks of an axis are on, and how many each has at least."""

    ranks: int
    hosts: int
    local: int


class Network:
    """The links between the ranks of a plan's axes through `rank`."""

    def __init__(self, cluster: Cluster, plan: Plan, rank: int) -> None:
        cluster.require_hosts(plan.size)
        self.cluster, self.plan, self.rank = cluster, plan, rank
        self.hosts = cache(self._hosts)

    def seconds(self, sent: Mapping[Key, Tally]) -> dict[tuple[str, str], float]:
        """The seconds of messages of each axis and kind; none of copies between tiers."""
        found: dict[tuple[str, str], float] = {}
        for (axis, kind, _), tally in sent.items():
            if axis == TIER:
                continue
            relative = self.cluster.collective(kind)
            latency_s = tally.calls * relative.latency * self.latency_s(axis, kind)
            time_s = latency_s + tally.sent_bytes / (relative.rate * self.rate(axis, kind))
            found[axis, kind] = found.get((axis, kind), 0.0) + time_s
        return found

    def latency_s(self, axis: str, kind: str) -> float:
        """The time of a message without bytes."""
        on, inside, between = self.hosts(axis), self.cluster.inside, self.cluster.between
        if kind in ("all_to_all", "send"):
            return between.latency_s if on.hosts > 1 else inside.latency_s
        if kind == "all_reduce":
            levels = math.ceil(math.log2(on.hosts))
            return 2 * ((on.local - 1) * inside.latency_s + levels * between.latency_s)
        return (on.local - 1) * inside.latency_s + (on.hosts - 1) * between.latency_s

    def rate(self, axis: str, kind: str) -> float:
        """The bytes that a rank sends in a second."""
        on, part = self.hosts(axis), self.cluster.derating.links
        inside, between = self.cluster.inside.bytes_per_s, self.cluster.between.bytes_per_s
        if on.hosts == 1:
            rate = inside
        elif kind == "all_to_all":
            rate = between * (on.ranks - 1) / (on.ranks - on.local)
        elif kind == "send":
            rate = between
        else:
            rate = min(inside, on.local * between)
        return part * rate * (on.ranks - 1 if kind == "broadcast" else 1)

    @property
    def tier_rate(self) -> float:
        """The bytes that a copy between the device and host memory moves in a second."""
        link, part = self.cluster.host_link, self.cluster.derating.links
        return link.bytes_per_s * part if link else self.cluster.bytes_per_s / 2

    def _hosts(self, axis: str) -> AxisHosts:
        name, _, number = axis.partition(".")
        plan = self.plan.of_layers(int(number)) if number else self.plan
        ranks = plan.size_of(name)
        mesh_axis = plan.inner_data_axis if name in ("ep", "edp") else name
        names = [each for each, _ in plan.mesh.axes]
        inner = names[names.index(mesh_axis) + 1 :] if mesh_axis in names else []
        stride = math.prod(map(plan.mesh.size_of, inner)) * (plan.ep if name == "edp" else 1)
        first = self.rank - stride * plan.coordinate(self.rank).get(name, 0)
        hosts = [(first + k * stride) // self.cluster.devices_per_host for k in range(ranks)]
        count = len(set(hosts))
        return AxisHosts(ranks, count, max(1, ranks // count))


# --- seconds of operations ------------------------------------------------------------------------

#: The words of plans and clusters for torch's types; the others compute no products.
PRECISIONS: Final = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def operation_s(operation: Operation, cluster: Cluster) -> float:
    work_s, launch_s = operation.moved_bytes / cluster.bytes_per_s, cluster.device.launch_s
    if flops := operation.done_flops:
        work_s = max(work_s, flops / cluster.flops_per_s(precision(operation), flops))
    return max(work_s, launch_s) if cluster.device.asynchronous else work_s + launch_s


def precision(operation: Operation) -> str:
    return PRECISIONS.get(operation.dtype, operation.dtype)
