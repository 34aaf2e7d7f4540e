"""Replicas computed at the same time, one thread each."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.core.tools.tree import leaves
from shardwise.techniques.replicas.devices import Devices, as_devices


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]] | None = None,
    devices: Devices | None = None,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` in a thread for every i; returns the outputs.

    An input that is no tuple is the only argument.  Each thread has the caller's grad mode,
    inference mode, autocast and context variables, and its device's current stream.  `devices`
    name the threads; by default each is the device of the first tensor among the inputs.

    All threads have ended when this function returns or raises.  If replicas fail, the
    first error is raised unchanged, with a note that names the replica and its device.

    Raises:
        InputError: a module that cannot be called; different numbers of modules, inputs, kwargs
            and devices.
    """
    for module in modules:
        if not callable(module):
            allowed = "modules, as replicate(module, devices) returns them"
            raise bad(
                f"parallel_apply of {short_repr(module)}",
                allowed,
                "parallel_apply(replicas, inputs)",
            )
    kwargs = [{} for _ in modules] if kwargs is None else kwargs
    calls = [x if isinstance(x, tuple) else (x,) for x in inputs]
    if devices is None:
        targets = [_device(part) for part in zip(modules, calls, kwargs, strict=False)]
    else:
        targets = as_devices(devices)
    counts = [len(modules), len(calls), len(kwargs), len(targets)]
    if not modules or len(set(counts)) > 1:
        given = "{} modules, {} inputs, {} kwargs and {} devices".format(*counts)
        raise bad(given, "as many of each, at least one", "parallel_apply(replicas, inputs)")
    state = _State()
    choose_vector_functions()
    with ThreadPoolExecutor(len(modules), "replica") as pool:
        futures = [
            pool.submit(copy_context().run, state.call, device, module, args, options)
            for device, module, args, options in zip(targets, modules, calls, kwargs, strict=True)
        ]
    for i, future in enumerate(futures):
        error = future.exception()
        if error is not None:
            error.add_note(f"in replica {i} of {len(modules)}, on {targets[i]}")
            try:
                raise error
            finally:
                del error, future, futures  # else they and this frame refer to one another
    return [future.result() for future in futures]


class _State:
    """The caller's thread-local state, for the threads of its replicas."""

    def __init__(self) -> None:
        self.graded, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.cached = torch.is_autocast_cache_enabled()
        kinds = ("cpu", "cuda")
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        self.streams = {torch.device("cuda", i): torch.cuda.current_stream(i) for i in gpus}

    def call(self, device: torch.device, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `module` in this thread as the caller would."""
        with self.entered(device):
            return module(*args, **kwargs)

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """This state, in the thread of `device`."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.graded))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cached))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            yield


def _device(part: tuple[nn.Module, Any, Any]) -> torch.device:
    """The device of the first tensor among the inputs or the parameters."""
    module, *inputs = part
    tensors = [*leaves(inputs, Tensor), *module.parameters()]
    return tensors[0].device if tensors else torch.device("cpu")


def choose_vector_functions() -> None:
    """Let torch's vector functions (sin, exp) be chosen by one thread.

    The library behind them chooses those of the processor in the first call. A second thread that
    calls one meanwhile gets results with errors of 1e-8.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(8, dtype=dtype, device="cpu").sin().exp()
