"""The machine as one process sees it: processors, memory, GPUs and their links, versions."""

import os
import platform
import socket
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.cuda import nccl

import shardwise
from shardwise.comm.backends import available_backends
from shardwise.comm.start.hosts import host_number
from shardwise.comm.tiers.host_memory import free_bytes, limit_bytes

#: NVML's levels of the nearest common ancestor of two GPUs, in nvidia-smi's terms.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Gpu:
    """One GPU that PyTorch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """One machine, seen from one process."""

    host: str
    host_number: int
    cores: int
    threads: int  # of torch in this process
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[str, ...], ...]  # as `nvidia-smi topo -m`, empty without NVML
    backends: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]


def look() -> Machine:
    """This machine."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    memory_bytes = limit_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Machine(
        host=socket.gethostname(),
        host_number=host_number(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        free_bytes=int(min(memory_bytes, free_bytes())),
        gpus=tuple(Gpu(each.name, each.total_memory) for each in properties),
        links=links(_nvml()) if properties else (),
        backends=available_backends(),
        versions=versions(),
    )


def versions() -> tuple[tuple[str, str], ...]:
    """The versions that must be equal on all ranks."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shardwise": shardwise.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl.version()))
    return tuple(found.items())


def _nvml() -> Any:
    """NVIDIA's management library, initialised; None if it or its driver is missing."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except (ImportError, OSError, RuntimeError) as error:
        del error
        return None
    except Exception as error:  # NVMLError is a plain Exception
        if type(error).__name__.startswith("NVMLError"):
            return None
        raise
    return nvml


def links(nvml: Any) -> tuple[tuple[str, ...], ...]:
    """The link between each two GPUs, in the words of `nvidia-smi topo -m`.

    NV4: 4 NVLinks.  PIX, PXB: one or several PCIe switches.  PHB: a PCIe host bridge.  NODE, SYS:
    the interconnect within, or between, NUMA nodes.  `nvml` is the module pynvml; None: no links.
    """
    if nvml is None:
        return ()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return tuple(tuple("X" if a is b else _link(nvml, a, b) for b in gpus) for a in gpus)


def _link(nvml: Any, a: Any, b: Any) -> str:
    ways = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    if nvml.nvmlDeviceGetP2PStatus(a, b, ways) == nvml.NVML_P2P_STATUS_OK:
        return f"NV{_nvlinks(nvml, a)}"
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    return LEVELS.get(level, f"level {level}")


def _nvlinks(nvml: Any, gpu: Any) -> int:
    """The number of active NVLinks of a GPU."""
    count = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(gpu, number) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # a number that this GPU does not have
            break
    return count
