"""A cluster as numbers: the roofline of its devices, its links, and how far from them work stays.

    [device]          name, memory_bytes, memory_bytes_per_s, launch_s, peak_flops by precision
    [inside]          a device's link to the others of its host: latency_s, bytes_per_s
    [between]         a device's link to those of other hosts
    [host_link]       to the memory of its host; none if the device is its host's processor
    host_bytes_per_s, disk_bytes_per_s    a device's share of the rates of host memory and of disks
    [derating]        the part of the data sheet's rate that products, memory and links reach

What `shardwise doctor --save` measures has deratings of 1, and more than a data sheet says:

    hosts                 how many there are; a data sheet says nothing of that
    device.step_s         what a step takes beside its kernels and messages
    device.products       rates of products by their FLOPs, since small ones are slower
    device.asynchronous   whether a kernel is launched while the one before it runs
    device.overlap        the part of a message's time in which the device computes
    [collectives.NAME]    a collective's latency and rate, relative to those of the links

Rates are of one device, and links' rates of one direction.  Global ranks fill one host after
another.  (Roofline: Williams, Waterman, Patterson, CACM 52(4), 2009. Links: Hockney's model.)

Clusters by name are hosts of eight devices with NVLink between them.  The comments of their figures
number the public data sheets; NVLink and PCIe are stated for both directions together, and halved:

    1  NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM), 2021
    2  NVIDIA DGX A100 data sheet: eight ConnectX of 200 Gbit/s, one for each GPU
    3  NVIDIA H100 Tensor Core GPU data sheet (SXM), 2023; rates of products without sparsity
    4  NVIDIA DGX H100 data sheet: eight ConnectX-7 of 400 Gbit/s, one for each GPU
    5  NVIDIA H200 Tensor Core GPU data sheet (SXM), 2024
    6  NVIDIA DGX B200 and HGX B200 data sheets, 2024: an eighth of the figures of eight GPUs
    7  NCCL, src/graph/tuning.cc, hwLat: the hop of a ring with the protocol LL128
    8  NVIDIA, "Getting started with CUDA graphs", 2019: the time between short kernels
    9  github.com/stas00/ml-engineering, compute/accelerator, best shapes in bf16: 0.869 of the
       data sheet on an A100, 0.803 on an H100, 0.776 on a B200
    10 github.com/calculon-ai/calculon, systems/a100_80g.json: also the part of the device that a
       message on NVLink takes
    11 data sheets of AMD EPYC 7742 (204.8 GB/s), Intel Xeon 8480C and 8570 (307.2 and 358.4 GB/s),
       two of which are in the hosts of 2, 4 and 6
"""

import json
import math
import tomllib
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shardwise.core.errors import Problem, bad, expanded, read_text, refusal
from shardwise.core.tools.arguments import suggest

Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]
_FROZEN: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Device(BaseModel):
    """One device. `launch_s` is the least time between the begins of two kernels.

    step_s        of a step beside its kernels and messages: what the program itself computes
    asynchronous  False: a kernel takes its launch and its work, one after the other
    overlap       the part of a message's time in which the device computes at its full rate
    products      by precision, pairs of the FLOPs of a product and its rate, in order
    """

    model_config = _FROZEN

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bytes_per_s: Rate
    launch_s: Seconds
    peak_flops: dict[str, Rate]
    step_s: Seconds = 0.0
    asynchronous: bool = True
    overlap: Part = 1.0
    products: dict[str, tuple[tuple[Rate, Rate], ...]] = Field(default_factory=dict)

    @field_validator("products")
    @classmethod
    def _in_order(cls, products: dict[str, tuple[tuple[float, float], ...]]) -> object:
        for pairs in products.values():
            if not pairs or any(a >= b for (a, _), (b, _) in pairwise(pairs)):
                raise ValueError("pairs [FLOPs, FLOPs a second], the FLOPs ascending")
        return products


class LinkSpeed(BaseModel):
    """A link of a device: a message of n bytes takes latency_s + n / bytes_per_s."""

    model_config = _FROZEN

    latency_s: Seconds
    bytes_per_s: Rate


class CollectiveSpeed(BaseModel):
    """A collective relative to the links that it takes: its latency over theirs, its rate too."""

    model_config = _FROZEN

    latency: Rate = 1.0
    rate: Rate = 1.0


class Derating(BaseModel):
    """What parts of the rates of a data sheet are sustained, one for each class of work.

    products  the rate of the best shape (9) times 0.82, which is fitted to the measured time of one
              layer of a 22B model, forward and backward (arXiv 2205.05198, table 4). No other
              figure is fitted, and no training run is used
    memory    large transfers (10)
    links     all-reduce of large messages on NVLink: 240 of 300 GB/s on an A100 (nccl-tests)
    """

    model_config = _FROZEN

    products: Share = 0.71
    memory: Share = 0.90
    links: Share = 0.80


class Cluster(BaseModel):
    """Hosts of equal devices. `hosts` None: as many as a plan needs."""

    model_config = _FROZEN

    devices_per_host: Annotated[int, Field(gt=0)]
    device: Device
    inside: LinkSpeed
    between: LinkSpeed
    host_link: LinkSpeed | None = None
    host_bytes_per_s: Rate | None = None
    disk_bytes_per_s: Rate | None = None
    hosts: Annotated[int, Field(gt=0)] | None = None
    derating: Derating = Derating()
    collectives: dict[str, CollectiveSpeed] = Field(default_factory=dict)

    def flops_per_s(self, precision: str, flops: float = math.inf) -> float:
        """The rate of products of so many FLOPs, on a line. Raises InputError without a peak."""
        peak = self.device.peak_flops.get(precision)
        if peak is None:
            given = f"the cluster of {self.device.name}, without device.peak_flops.{precision}"
            allowed = "a peak for the precision of each product of the model"
            raise bad(given, allowed, f"{precision} = 1e13 under [device.peak_flops]")
        return self.derating.products * min(peak, self._product_rate(precision, flops, peak))

    def collective(self, kind: str) -> CollectiveSpeed:
        return self.collectives.get(kind) or CollectiveSpeed()

    def require_hosts(self, ranks: int) -> None:
        """Raise InputError for a plan of more ranks than there are devices."""
        if self.hosts is not None and ranks > self.hosts * self.devices_per_host:
            given = f"a plan of {ranks} ranks, with a cluster that was measured on "
            given += f"{self.hosts * self.devices_per_host}"
            allowed = "at most as many ranks as `shardwise doctor --save` measured"
            raise bad(given, allowed, f"shardwise doctor --nproc {ranks} --save cluster.toml")

    def _product_rate(self, precision: str, flops: float, peak: float) -> float:
        pairs = self.device.products.get(precision, ((math.inf, peak),))
        after = bisect_left(pairs, flops, key=lambda pair: pair[0])
        if after in (0, len(pairs)):
            return pairs[min(after, len(pairs) - 1)][1]
        (least, slow), (most, fast) = pairs[after - 1 : after + 1]
        return slow + (fast - slow) * (flops - least) / (most - least)

    @property
    def bytes_per_s(self) -> float:
        return self.device.memory_bytes_per_s * self.derating.memory

    @property
    def host_rate(self) -> float | None:
        """Bytes a second of host memory; None: not known."""
        host = self.host_bytes_per_s and self.host_bytes_per_s * self.derating.memory
        return host if self.host_link else self.bytes_per_s


# --- clusters by name -----------------------------------------------------------------------------

_NVLINK_HOP_S, _NETWORK_HOP_S = 1.9e-6, 4.0e-6  # 7
_LAUNCH_S: Final = 3.8e-6  # 8
_OVERLAP: Final = 0.85  # 10
_GBIT: Final = 1e9 / 8
_LAYER: Final = 0.82  # of what the best shape reaches, in a layer (Derating)


def _device(name: str, gb: int, tb_per_s: float, *teraflops: float) -> Device:
    """A device by its memory, and its peaks in 16, 32 and 64 bits."""
    half, single, double = (1e12 * each for each in teraflops)
    return Device(
        name=name,
        memory_bytes=gb * 10**9,
        memory_bytes_per_s=tb_per_s * 1e12,
        launch_s=_LAUNCH_S,
        overlap=_OVERLAP,
        peak_flops={"bf16": half, "fp16": half, "fp32": single, "fp64": double},
    )


def _hosts_of_eight(
    device: Device, products: float, nvlink: int, network: int, pcie: int, memory: float
) -> Cluster:
    """By GB/s in one direction of NVLink and PCIe, Gbit/s of the network, GB/s of the memory of
    each of two processors; `products` is what the best shape reaches (9).
    """
    return Cluster(
        devices_per_host=8,
        device=device,
        inside=LinkSpeed(latency_s=_NVLINK_HOP_S, bytes_per_s=nvlink * 1e9),
        between=LinkSpeed(latency_s=_NETWORK_HOP_S, bytes_per_s=network * _GBIT),
        host_link=LinkSpeed(latency_s=_LAUNCH_S, bytes_per_s=pcie * 1e9),
        host_bytes_per_s=2e9 * memory / 8,
        derating=Derating(products=round(_LAYER * products, 2)),
    )


PRESETS: Final[dict[str, Cluster]] = {
    name: _hosts_of_eight(_device(*sheet), *links)
    for name, sheet, links in (
        # 1, 2: NVLink 600 GB/s, PCIe gen 4 64 GB/s; 3, 4: 900, PCIe gen 5 128; 5: with the links
        # of 3; 6: of eight GPUs 1,440 GB, 64 TB/s, NVLink 14.4 TB/s; memory of hosts: 11
        ("a100-80gb", ("A100 80GB SXM", 80, 2.039, 312, 19.5, 19.5), (0.869, 300, 200, 32, 204.8)),
        ("h100-sxm", ("H100 SXM", 80, 3.35, 989, 67, 67), (0.803, 450, 400, 64, 307.2)),
        ("h200", ("H200 SXM", 141, 4.8, 989, 67, 67), (0.803, 450, 400, 64, 307.2)),
        ("b200", ("B200", 180, 8, 2250, 75, 37), (0.776, 900, 400, 64, 358.4)),
    )
}

# --- the file of a cluster ------------------------------------------------------------------------

_EXAMPLE: Final = "h100-sxm"


def cluster_of(name: str | Path) -> Cluster:
    """The preset of this name, or the file's cluster. Raises InputError that lists all problems."""
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path, allowed = Path(expanded(str(name))), f"{', '.join(PRESETS)}, or the file of a cluster"
    near = suggest(str(name), PRESETS, 0.3) or _EXAMPLE
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        raise bad(f"the cluster '{name}' ({error.strerror})", allowed, near) from None
    except (ValueError, RecursionError) as error:  # 5000 brackets
        raise bad(f"the cluster {name}, which is not TOML: {error}", allowed, near) from None
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        problems = [_problem(dict(each)) for each in error.errors()]
        raise refusal(f"the cluster {name}", problems) from None


def text_of(cluster: Cluster) -> str:
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))


def _problem(error: dict[str, Any]) -> Problem:
    """One of pydantic's errors, with the value of a preset as the remedy."""
    *outer, name = (str(part) for part in error["loc"])
    section: Any = PRESETS[_EXAMPLE].model_dump()
    for part in outer:
        section = section.get(part) or {}
    key = ".".join([*outer, name])
    if error["type"] == "extra_forbidden":
        near = suggest(name, section) or next(iter(section), key)
        return Problem(f"the unknown key {key} of a cluster", ", ".join(section), near)
    instead = json.dumps(section.get(name, 1e9))
    if section.get(name) and isinstance(section[name], dict):
        instead = f"[{key}] with {', '.join(section[name])}"
    else:
        instead = f"{key} = {instead}, as in {_EXAMPLE}"
    if error["type"] == "missing":
        return Problem(f"a cluster without {key}", "all keys but [derating]", instead)
    given, allowed = json.dumps(error["input"], default=str)[:80], str(error["msg"])
    return Problem(f"{key} = {given}", allowed.removeprefix("Input should be "), instead)
