"""Clusters by name, from public data sheets: hosts of eight devices with NVLink between them.

Sources, by number, in the comments of the figures:

    1  NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM), 2021
    2  NVIDIA DGX A100 data sheet: eight ConnectX of 200 Gbit/s, one for each GPU
    3  NVIDIA H100 Tensor Core GPU data sheet (SXM), 2023; rates of products without sparsity
    4  NVIDIA DGX H100 data sheet: eight ConnectX-7 of 400 Gbit/s, one for each GPU
    5  NVIDIA H200 Tensor Core GPU data sheet (SXM), 2024
    6  NVIDIA DGX B200 and HGX B200 data sheets, 2024: an eighth of the figures of eight GPUs
    7  NCCL, src/graph/tuning.cc, hwLat: the hop of a ring with the protocol LL128
    8  NVIDIA, "Getting started with CUDA graphs", 2019: the time between short kernels

NVLink and PCIe are stated for both directions together; the figures here are half of that.
"""

from typing import Final

from shardwise.prediction.cluster import Cluster, Device, LinkSpeed

_NVLINK_HOP_S, _NETWORK_HOP_S = 1.9e-6, 4.0e-6  # 7
_LAUNCH_S: Final = 3.8e-6  # 8
_GBIT: Final = 1e9 / 8


def _hosts_of_eight(
    device: Device, *, nvlink_bytes_per_s: float, network_gbit: float, pcie_bytes_per_s: float
) -> Cluster:
    return Cluster(
        devices_per_host=8,
        device=device,
        inside=LinkSpeed(latency_s=_NVLINK_HOP_S, bytes_per_s=nvlink_bytes_per_s),
        between=LinkSpeed(latency_s=_NETWORK_HOP_S, bytes_per_s=network_gbit * _GBIT),
        host_link=LinkSpeed(latency_s=_LAUNCH_S, bytes_per_s=pcie_bytes_per_s),
    )


_A100: Final = Device(
    name="A100 80GB SXM",
    memory_bytes=80 * 10**9,  # 1
    memory_bytes_per_s=2.039e12,  # 1
    launch_s=_LAUNCH_S,
    peak_flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12},  # 1
)
_H100: Final = Device(
    name="H100 SXM",
    memory_bytes=80 * 10**9,  # 3
    memory_bytes_per_s=3.35e12,  # 3
    launch_s=_LAUNCH_S,
    peak_flops={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12, "fp64": 67e12},  # 3
)
_H200: Final = Device(
    name="H200 SXM",
    memory_bytes=141 * 10**9,  # 5
    memory_bytes_per_s=4.8e12,  # 5
    launch_s=_LAUNCH_S,
    peak_flops=_H100.peak_flops,  # 5
)
_B200: Final = Device(
    name="B200",
    memory_bytes=180 * 10**9,  # 6: 1,440 GB
    memory_bytes_per_s=8e12,  # 6: 64 TB/s
    launch_s=_LAUNCH_S,
    peak_flops={"bf16": 2.25e15, "fp16": 2.25e15, "fp32": 75e12, "fp64": 37e12},  # 6
)

PRESETS: Final[dict[str, Cluster]] = {
    "a100-80gb": _hosts_of_eight(  # 1: NVLink 600 GB/s, PCIe gen 4 64 GB/s; 2
        _A100, nvlink_bytes_per_s=300e9, network_gbit=200, pcie_bytes_per_s=32e9
    ),
    "h100-sxm": _hosts_of_eight(  # 3: NVLink 900 GB/s, PCIe gen 5 128 GB/s; 4
        _H100, nvlink_bytes_per_s=450e9, network_gbit=400, pcie_bytes_per_s=64e9
    ),
    "h200": _hosts_of_eight(  # 5: NVLink 900 GB/s, PCIe gen 5 128 GB/s; 4
        _H200, nvlink_bytes_per_s=450e9, network_gbit=400, pcie_bytes_per_s=64e9
    ),
    "b200": _hosts_of_eight(  # 6: NVLink 14.4 TB/s for eight, 400 Gbit/s each, PCIe gen 5
        _B200, nvlink_bytes_per_s=900e9, network_gbit=400, pcie_bytes_per_s=64e9
    ),
}
