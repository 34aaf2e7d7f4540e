"""The suite `dataparallel`: one process with a thread per device, and one process per device.

    sw.DDP                 n processes, each on its rows; the reference
    sw.DataParallel        rank 0 on all rows, in n threads; the other ranks wait
    torch DataParallel     torch.nn.DataParallel on all rows; without GPUs, the module itself
    plain module           rank 0 on all rows, in one thread

All are the same training of the same global batch.
"""

from dataclasses import replace

from torch import nn

import shardwise as sw
from benchmarks.contenders.contender import Contender, Loop, Setup, adamw, plain_loop
from shardwise.comm.torch_links import TorchLinks


def ddp(model: nn.Module, setup: Setup) -> Loop:
    """sw.DDP in a plain loop."""
    world = sw.init(setup.device.type)
    wrapped, links = sw.DDP(model, world), world.links
    loop = plain_loop(wrapped, adamw(wrapped.parameters()), setup)
    if isinstance(links, TorchLinks):
        loop = replace(loop, shared_bytes=lambda: links.shared_bytes)
    return loop


def threads(model: nn.Module, setup: Setup) -> Loop:
    """sw.DataParallel with a device for each rank."""
    wrapped = sw.DataParallel(model, devices=[str(setup.device)] * setup.ranks)
    return plain_loop(wrapped, adamw(wrapped.parameters()), setup)


def torchs(model: nn.Module, setup: Setup) -> Loop:
    """torch.nn.DataParallel; without GPUs it calls the module."""
    wrapped = nn.DataParallel(model, device_ids=[])
    return plain_loop(wrapped, adamw(wrapped.parameters()), setup)


def plain(model: nn.Module, setup: Setup) -> Loop:
    """The module itself."""
    return plain_loop(model, adamw(model.parameters()), setup)


DDP = Contender("sw.DDP", "ddp", ddp)
ONE_PROCESS = (
    Contender("sw.DataParallel", "", threads, whole_batch=True, alone=True),
    Contender(
        "torch DataParallel",
        "",
        torchs,
        note="without GPUs it calls the module itself",
        whole_batch=True,
        alone=True,
    ),
    Contender("plain module", "", plain, whole_batch=True, alone=True),
)
