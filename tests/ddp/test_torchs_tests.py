"""PyTorch's own tests of DDP, from the installed package, pass under `sw.DDP` on processors.

`torch.testing._internal.distributed.distributed_test` has them for one GPU a rank. Here they run
one after another in processes of ours that are a world of gloo already:

    decorators that ask for GPUs    do nothing; replaced before the module is imported
    cuda, and a device's number     mean the processor, in every call of torch
    DistributedDataParallel         is Ours, around sw.DDP

Left out are tests about CUDA and SyncBatchNorm, communication hooks, `join`, ignored parameters,
DDP's own mixed precision and options, and the reducer's internals, logs and errors.
"""

import importlib
import importlib.util
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.techniques.data.apply import drivers
from tests.pool import Pool

HOME = "torch.testing._internal.distributed.distributed_test"
ASK_FOR_GPUS = (
    *("skip_if_lt_x_gpu", "skip_if_no_gpu", "nccl_skip_if_lt_x_gpu"),
    "require_n_gpus_for_nccl_backend",
)


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
def on_processor(tests: ModuleType) -> Iterator[None]:
    """Inside, `Ours` is DistributedDataParallel, and CUDA is the processor."""
    with ExitStack() as inside:
        put = lambda *place, **by: inside.enter_context(mock.patch.object(*place, **by))  # noqa: E731
        put(nn.parallel, "DistributedDataParallel", Ours)
        put(tests, "DistributedDataParallel", Ours)
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


def run(world: World, which: str, folder: str) -> dict[str, str] | str:
    """What tests by name raised on this rank; another torch may have fewer."""
    tests = load(world.size, folder)
    if isinstance(tests, str):
        return tests
    kind = type("T", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    with on_processor(tests):
        return {n: _outcome(kind, n, world) for n in which.split() if hasattr(kind, n)}


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


#: Tests that pass, of torch 2.13.
RUN = """
    test_DistributedDataParallel
    test_DistributedDataParallelCPU
    test_DistributedDataParallelCPU_grad_is_view
    test_DistributedDataParallel_requires_grad
    test_DistributedDataParallel_with_amp_and_grad_is_view
    test_accumulate_gradients_no_sync
    test_accumulate_gradients_no_sync_grad_is_view
    test_ddp_apply_optim_in_backward
    test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
    test_ddp_broadcast_buffer
    test_ddp_compile_static_graph
    test_ddp_create_graph
    test_ddp_forward_backward_hook
    test_ddp_inference
    test_ddp_model_diff_num_params_across_ranks
    test_ddp_model_diff_shape_across_ranks
    test_ddp_namedtuple
    test_ddp_new_tensor_in_fwd
    test_ddp_new_tensor_in_fwd_static_graph
    test_ddp_remove_autograd_hooks
    test_ddp_returns_tensor_with_no_grad
    test_ddp_shared_grad_acc_unused_params
    test_ddp_sink_noclone
    test_ddp_static_graph_nested_types
    test_ddp_zero_output_features
    test_grads_same_across_ranks_with_no_sync
    test_output_unused_in_loss_dict_module
    test_output_unused_in_loss_tuple_module
    test_post_localSGD_optimizer_parity
    test_post_localSGD_optimizer_parity_grad_is_view
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    test_post_localSGD_optimizer_step_reload
    test_stateless_api_with_ddp
    test_static_graph_multi_forward
    test_undefined_grad_parity_unused_parameters
"""


@pytest.mark.full
def test_torchs_tests_of_ddp_pass(tmp_path: Path) -> None:
    """In processes of their own: the tests change torch for good."""
    for name in ("barrier", "test_dir"):
        (tmp_path / name).mkdir()
    (tmp_path / "lockfile").touch()
    pool = Pool(2)
    try:
        outcomes = pool.run(run, (RUN, str(tmp_path)))
    finally:
        pool.close()
    if isinstance(outcomes[0], str):
        pytest.skip(outcomes[0])
    assert all(outcomes)
    assert [n for found in outcomes for n, text in found.items() if text != "passed"] == []
