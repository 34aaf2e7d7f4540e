"""PyTorch's own tests of DDP, from the installed package, run against `sw.DDP` on processors.

`torch.testing._internal.distributed.distributed_test` holds the tests of
`torch.nn.parallel.DistributedDataParallel`, written for one GPU a rank and a process each test.
Here they run one after another in processes of ours that are a world of gloo already:

    decorators that ask for GPUs    leave a test as it is; replaced before the module is imported
    cuda, and a device's number     mean the processor, in every call of torch
    DistributedDataParallel         is Ours, around sw.DDP; as a control Stock, torch's own
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.techniques.data.apply import drivers

HOME = "torch.testing._internal.distributed.distributed_test"
ASK_FOR_GPUS = (
    *("skip_if_lt_x_gpu", "skip_if_no_gpu", "nccl_skip_if_lt_x_gpu"),
    "require_n_gpus_for_nccl_backend",
)
StockDDP = nn.parallel.DistributedDataParallel


class Stock(StockDDP):
    """torch's DDP, of a module on the processor whatever devices are named."""

    def __init__(self, module: nn.Module, *_: Any, **options: Any) -> None:
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        super().__init__(module, **options)


class Ours(nn.Module):
    """What the tests use of DistributedDataParallel, around a module under `sw.DDP`."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        process_group: Any = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        inner = module.module if isinstance(module, Ours) else module
        assert isinstance(inner, nn.Module)
        self.process_group = process_group or dist.group.WORLD
        if drivers(inner):  # several objects of a test have one module
            sw.unwrap(inner)
        size = max(1, int(bucket_cap_mb * 2**20))
        self.options = {"bucket_bytes": size, "broadcast_buffers": broadcast_buffers}
        try:
            self.module = sw.DDP(inner, **self.options)
        except InputError as error:
            raise RuntimeError(str(error)) from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's: what is loaded is wrapped again, on the default group."""
        super().__setstate__(state)
        self.process_group = dist.group.WORLD
        sw.DDP(self.module, **self.options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        return sw.no_sync(self.module)

    def _remove_autograd_hooks(self) -> None:
        sw.unwrap(self.module)

    def _set_static_graph(self) -> None:
        """A hint: sw.DDP takes no less from a graph that stays the same."""

    def _set_ddp_sink_clone(self, _: bool) -> None:
        """sw.DDP copies no output, whatever is set."""


class Unsynced(Ours):
    """A fault, to show that the tests find one: every rank trains alone."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        sw.unwrap(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class OnProcessor(TorchFunctionMode):
    """Every device that a call names is the processor."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = (args[0], *(_processor(x) for x in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _processor(kwargs["device"])
        return func(*args, **kwargs)


def _processor(x: Any) -> Any:
    """`x`, or the processor if it names a device."""
    number = isinstance(x, int) and not isinstance(x, bool)
    named = isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda"))
    return torch.device("cpu") if number or named else x


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return _MODULE_TO(self, *map(_processor, args), **{k: _processor(x) for k, x in kwargs.items()})


_MODULE_TO = nn.Module.to


@contextmanager
def on_processor(ddp: type[nn.Module], tests: ModuleType) -> Iterator[None]:
    """Inside, `ddp` is DistributedDataParallel, and CUDA is the processor."""
    with ExitStack() as inside:
        put = lambda *place, **by: inside.enter_context(mock.patch.object(*place, **by))  # noqa: E731
        put(nn.parallel, "DistributedDataParallel", ddp)
        put(tests, "DistributedDataParallel", ddp)
        put(nn.Module, "cuda", lambda self, *_: self)
        put(nn.Module, "to", _to)
        put(tests, "init_multigpu_helper", lambda ranks, _: {rank: [rank] for rank in range(ranks)})
        put(torch.cuda, "current_device", lambda: 0)
        for name in ("set_device", "synchronize", "manual_seed"):
            put(torch.cuda, name, lambda *_, **__: None)
        inside.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        inside.enter_context(OnProcessor())
        yield


def load(ranks: int, folder: str) -> ModuleType | str:
    """The module of the tests; where this torch has none that can be imported, why."""
    if HOME in sys.modules:
        return sys.modules[HOME]
    if importlib.util.find_spec("expecttest") is None:  # a base class, for other tests than these
        stub = ModuleType("expecttest")
        vars(stub).update(TestCase=unittest.TestCase, ACCEPT=False)
        sys.modules.setdefault("expecttest", stub)
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), TEMP_DIR=folder)
    try:
        asking = importlib.import_module("torch.testing._internal.common_distributed")
        common = importlib.import_module("torch.testing._internal.common_utils")
        with ExitStack() as inside:
            # some tests are skipped on PyTorch's own machines, which run Linux
            inside.enter_context(mock.patch.object(common, "IS_LINUX", False))
            for name in ASK_FOR_GPUS:
                leave = _leave if name == "skip_if_no_gpu" else lambda *_, **__: _leave
                inside.enter_context(mock.patch.object(asking, name, leave))
            return importlib.import_module(HOME)
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no {HOME} that can be imported: {error}"


def _leave(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def names(tests: ModuleType) -> list[str]:
    """The tests that use DistributedDataParallel, by themselves or by what they call."""
    base = tests.DistributedTest._DistTestBase
    there = [name for name in sorted(dir(base)) if name.startswith("test_")]
    return [name for name in there if name.startswith("test_ddp_") or _uses(base, name)]


def _uses(base: type, name: str) -> bool:
    method = getattr(base, name, None)
    if method is None:
        return False
    source = inspect.getsource(inspect.unwrap(method))
    called = set(re.findall(r"self\.(_[a-z]\w+)\(", source)) - {name}
    return "DistributedDataParallel(" in source or any(_uses(base, each) for each in called)


def find(world: World, folder: str) -> list[str] | str:
    """The names of the tests there are; where there are none, why."""
    tests = load(world.size, folder)
    return names(tests) if isinstance(tests, ModuleType) else tests


DDPS: dict[str, type[nn.Module]] = {"ours": Ours, "stock": Stock, "unsynced": Unsynced}


def run(world: World, which: list[str], ddp: str, folder: str) -> dict[str, str]:
    """Run tests by name on this rank, with DDPS[ddp]; of each "passed", or what it raised."""
    tests = load(world.size, folder)
    assert isinstance(tests, ModuleType), tests
    kind = type("T", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    with on_processor(DDPS[ddp], tests):
        return {name: _outcome(kind, name, world) for name in which}


def _outcome(kind: Any, name: str, world: World) -> str:
    torch.manual_seed(1234)
    test = kind(name)
    test.rank, test.file_name = world.rank, "unused"
    test._barrier = lambda *_, **__: dist.barrier()
    try:
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as left:
        return f"left with {left.code}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "passed"
