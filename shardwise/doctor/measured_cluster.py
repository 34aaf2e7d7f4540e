"""The cluster that a diagnosis measured: the value that `shardwise predict --cluster FILE` reads.

Its parts, and where they come from:

    devices       device_speed.py, the median over ranks
    links         the line of `send`, of an axis within a host and of one across hosts
    collectives   their lines, relative to what such links would take (prediction/time/network.py)
"""

from typing import Final

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.doctor.device_speed import median_device
from shardwise.doctor.diagnosis import Diagnosis
from shardwise.doctor.timing import Fit
from shardwise.prediction.cluster import (
    Cluster,
    CollectiveSpeed,
    Derating,
    Device,
    DiskSpeed,
    LinkSpeed,
)
from shardwise.prediction.time.network import Network

_LEAST_S: Final = 1e-7  # of a latency: times that do not grow with the size of a short message
_FREE: Final = LinkSpeed(latency_s=0.0, bytes_per_s=1e15)  # between the ranks of a world of one


def measured_cluster(found: Diagnosis) -> Cluster:
    """The cluster. Raises InputError for hosts none of whose links inside were measured."""
    hosts = list(found.hosts.values())
    local = max(map(len, hosts))
    inside, between = _links(found, hosts)
    if inside is None and local > 1:
        given = f"--save on {len(hosts)} hosts with the mesh '{found.mesh}'"
        instead = f"--mesh 'dp{len(hosts)} tp{local}'"
        raise bad(given, "a mesh with an axis within the hosts, and one across them", instead)
    inside = inside or between or _FREE
    cluster = Cluster(
        devices_per_host=local,
        hosts=len(hosts),
        device=_device(found, local),
        inside=inside,
        between=between or inside,
        host_link=_host_link(found),
        disk=None
        if found.disk is None
        else DiskSpeed(
            read_bytes_per_s=found.disk.read_bytes_per_s,
            write_bytes_per_s=found.disk.write_bytes_per_s,
        ),
        derating=Derating(products=1.0, memory=1.0, links=1.0),
    )
    network = Network(cluster, Plan.parse(found.mesh), 0)
    collectives = {
        fit.collective: CollectiveSpeed(
            latency=max(_LEAST_S, fit.latency_s) / network.latency_s(fit.axis, fit.collective),
            rate=(fit.bytes_per_s or _FREE.bytes_per_s) / network.rate(fit.axis, fit.collective),
        )
        for fit in reversed(found.fits)  # of several axes the first one counts
    }
    return cluster.model_copy(update={"collectives": collectives})


def _links(found: Diagnosis, hosts: list[list[int]]) -> tuple[LinkSpeed | None, LinkSpeed | None]:
    """The link within a host, and that between hosts."""
    mesh, host_of = Plan.parse(found.mesh).mesh, {r: n for n, own in enumerate(hosts) for r in own}
    links: dict[bool, LinkSpeed] = {}
    for fit in (fit for fit in found.fits if fit.collective == "send"):
        crosses = len({host_of[rank] for rank in mesh.line(fit.axis, 0)}) > 1
        links.setdefault(crosses, _link(fit))
    return links.get(False), links.get(True)


def _link(fit: Fit) -> LinkSpeed:
    rate = fit.bytes_per_s or _FREE.bytes_per_s
    return LinkSpeed(latency_s=max(_LEAST_S, fit.latency_s), bytes_per_s=rate)


def _device(found: Diagnosis, local: int) -> Device:
    """The device of a rank; ranks on processors share their host's memory."""
    machine = found.findings[0].machine
    speed = median_device([each.device for each in found.findings if each.device is not None])
    gpu = machine.gpus[0] if speed.kind == "cuda" else None
    return Device(
        name="cpu" if gpu is None else gpu.name,
        memory_bytes=machine.memory_bytes // local if gpu is None else gpu.memory_bytes,
        memory_bytes_per_s=speed.memory_bytes_per_s,
        launch_s=speed.launch_s,
        step_s=speed.step_s,
        peak_flops={name: max(r for _, r in pairs) for name, pairs in speed.products.items()},
        asynchronous=gpu is not None,
        overlap=speed.overlap,
        products={name: tuple(pairs) for name, pairs in speed.products.items()},
    )


def _host_link(found: Diagnosis) -> LinkSpeed | None:
    device = found.findings[0].device
    if device is None or device.host_link is None:
        return None
    latency_s, rate = device.host_link
    return LinkSpeed(latency_s=latency_s, bytes_per_s=rate)
