"""Shardwise trains one PyTorch model on many devices, and proves that it computes the same thing.

world  = sw.init()
engine = sw.parallelize(model, "dp2 zero3 bf16", world, optimizer=sw.AdamW(lr=3e-4), loss=loss_fn)
for batch in loader:
    metrics = engine.step(batch)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import callbacks, core, hf
    from shardwise.checkpoint.engines import async_save, load, save
    from shardwise.checkpoint.weights_folder import fill_from
    from shardwise.comm.start.launch import spawn
    from shardwise.comm.world import World, init
    from shardwise.core.errors import InputError, RankError, RunError
    from shardwise.core.layouts.tensor_table import Table
    from shardwise.core.mesh import Mesh
    from shardwise.core.plan.plan import Plan
    from shardwise.derive.plan_search import search
    from shardwise.derive.table import derive_table
    from shardwise.engine.engine import Engine
    from shardwise.engine.loader import Loader
    from shardwise.engine.optimizer.optimizer_spec import (
        SGD,
        Adafactor,
        Adam,
        AdamW,
        Lion,
        Muon,
        Optim,
    )
    from shardwise.engine.parallelize import parallelize
    from shardwise.engine.predict import predict
    from shardwise.engine.state.full import full_state_dict
    from shardwise.engine.step_end import Metrics
    from shardwise.kernels.cross_entropy import cross_entropy
    from shardwise.techniques import replicas
    from shardwise.techniques.expert.gate import Gate
    from shardwise.techniques.expert.moe_layer import MoE
    from shardwise.techniques.pipeline.partition import balance_by_time
    from shardwise.verify import Verify
    from shardwise.wrap.data_parallel import DataParallel
    from shardwise.wrap.pipe import Pipe
    from shardwise.wrap.unwrap import unwrap
    from shardwise.wrap.wrap import DDP, FSDP, clip_grad_norm, no_sync

    verify: Verify

__version__ = "0.1.0"

#: Where each public name lives.  Names are imported when first asked for, so that `import
#: shardwise`, plans and the command line's answers to bad input do not wait for torch.
_HOMES = {
    "DDP": "wrap.wrap",
    "FSDP": "wrap.wrap",
    "clip_grad_norm": "wrap.wrap",
    "no_sync": "wrap.wrap",
    "DataParallel": "wrap.data_parallel",
    "Engine": "engine.engine",
    "Loader": "engine.loader",
    "Metrics": "engine.step_end",
    "balance_by_time": "techniques.pipeline.partition",
    "parallelize": "engine.parallelize",
    "predict": "engine.predict",
    "Pipe": "wrap.pipe",
    "full_state_dict": "engine.state.full",
    "Adafactor": "engine.optimizer.optimizer_spec",
    "Lion": "engine.optimizer.optimizer_spec",
    "Muon": "engine.optimizer.optimizer_spec",
    "Adam": "engine.optimizer.optimizer_spec",
    "AdamW": "engine.optimizer.optimizer_spec",
    "Optim": "engine.optimizer.optimizer_spec",
    "SGD": "engine.optimizer.optimizer_spec",
    "InputError": "core.errors",
    "RankError": "core.errors",
    "RunError": "core.errors",
    "Mesh": "core.mesh",
    "Plan": "core.plan.plan",
    "Table": "core.layouts.tensor_table",
    "World": "comm.world",
    "init": "comm.world",
    "Gate": "techniques.expert.gate",
    "MoE": "techniques.expert.moe_layer",
    "cross_entropy": "kernels.cross_entropy",
    "derive_table": "derive.table",
    "search": "derive.plan_search",
    "fill_from": "checkpoint.weights_folder",
    "async_save": "checkpoint.engines",
    "load": "checkpoint.engines",
    "save": "checkpoint.engines",
    "spawn": "comm.start.launch",
    "unwrap": "wrap.unwrap",
}

#: Folders that are public names themselves.
_FOLDERS = {
    "callbacks": "callbacks",
    "core": "core",
    "hf": "hf",
    "replicas": "techniques.replicas",
    "verify": "verify",
}

__all__ = [
    "DDP",
    "FSDP",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "DataParallel",
    "Engine",
    "Gate",
    "InputError",
    "Lion",
    "Loader",
    "Mesh",
    "Metrics",
    "MoE",
    "Muon",
    "Optim",
    "Pipe",
    "Plan",
    "RankError",
    "RunError",
    "Table",
    "World",
    "async_save",
    "balance_by_time",
    "callbacks",
    "clip_grad_norm",
    "core",
    "cross_entropy",
    "derive_table",
    "fill_from",
    "full_state_dict",
    "hf",
    "init",
    "load",
    "no_sync",
    "parallelize",
    "predict",
    "replicas",
    "save",
    "search",
    "spawn",
    "unwrap",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"shardwise.{_FOLDERS[name]}")
    if name in _HOMES:
        return getattr(import_module(f"shardwise.{_HOMES[name]}"), name)
    text = f"module 'shardwise' has no attribute {name!r}"  # Python adds the nearest name
    raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
