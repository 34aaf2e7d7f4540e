"""The dry run: the real engine of one rank on the meta device, in a world whose links only count.

    engine           the one of `parallelize`: its hooks, moves, optimizer and pipeline are those of
                     a run; only `World.meta` differs
    tensors          parameters, what is computed from them, host memory and the disk have no memory
    other ranks      are assumed to send what this one sends (comm/fake.py)
    numbers          that ranks agree on are on the CPU; unknown ones that are read are zeros
    kernels          keep what the device's kernels keep (work.py)

A forward that reads values of the model raises torch's error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.fake import FakeLinks
from shardwise.comm.world import world_of
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.parallelize import build_engine
from shardwise.observe.meta_pass import AsOn, ToMeta, meta_copy
from shardwise.observe.work import Kernels, in_backward

_CPU: Final = torch.device("cpu")


class DryRun:
    """The engine of `rank` under a complete plan, for steps within `running`.
    `model` is not changed. Raises InputError like `parallelize`.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: EngineOptions, rank: int) -> None:
        self.loss, self.inside = options.objective, 0
        self.kernels: Kernels = options.kernels
        self.mode = ToMeta(read=self._read)
        world = replace(world_of(rank, plan.size, _CPU, FakeLinks()), meta=True)
        options = replace(options, loss=self._objective, fill=lambda *_: None)
        with torch.random.fork_rng(devices=[]), self.mode:
            self.engine: Engine = build_engine(meta_copy(model), plan, world, options)

    @contextmanager
    def running(self) -> Iterator[Engine]:
        with torch.random.fork_rng(devices=[]), AsOn(None, _CPU, self.kernels), self.mode:
            yield self.engine

    def _objective(self, model: nn.Module, batch: Any) -> Tensor:
        self.inside += 1
        try:
            return self.loss(model, batch)
        finally:
            self.inside -= 1

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the engine gets of an operation on meta tensors; NotImplemented: what torch gives.
        Numbers that it reads are zeros; known numbers that it would add unknown ones to stay, and
        kernels that update lists in place do nothing.  The model and its backward pass read none.
        """
        if self.inside or in_backward():
            return NotImplemented
        x = args[0]
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=x.dtype, device="cpu").item()
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == _CPU:
            return torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype, device="cpu")
        if func._schema.is_mutable and isinstance(x, list):
            return None
        return x if func._schema.is_mutable and not x.is_meta else NotImplemented
