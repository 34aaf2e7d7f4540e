"""Replicas of a module: one for each device, for the length of one forward and backward pass.

    replicate(module, [d0, d1, d2])     module itself | copy on d1 | copy on d2
                                             ^              |            |
                            backward:        +-- gradients -+------------+   summed

    scatter({"x": x_7, "k": k}, 3 devices)      {x[0:3], k}  {x[3:5], k}  {x[5:7], k}
    gather([y_3, y_2, y_2], device)              y_7

Replica 0 is the module. A copy's parameters are the results of a differentiable copy, so that its
gradients are added to those of the module's parameters. Its buffers are copies without a gradient.
`scatter` and `gather` work on any nesting of lists, tuples, dicts and dataclasses, and each is the
backward pass of the other, since they are made of differentiable splits, copies and concatenations.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves, mapped

Devices = Sequence[str | int | torch.device]

_EXAMPLE = 'devices=["cpu", "cpu"]'


def as_devices(devices: Devices) -> list[torch.device]:
    """The devices with indices. A CPU may be repeated, as each replica has a thread of its own."""
    if isinstance(devices, str | int | torch.device) or not isinstance(devices, Sequence):
        raise bad(f"devices={devices!r}", "a list with one device for each replica", _EXAMPLE)
    found = [_as_device(each) for each in devices]
    if not found:
        raise bad("devices=[]", "a list with one device for each replica", _EXAMPLE)
    return found


def _as_device(given: Any) -> torch.device:
    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError):
        raise bad(f"the device {given!r}", 'names such as "cpu" and "cuda:0"', _EXAMPLE) from None
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if device.type != "cuda" or index >= count:
        raise bad(f"the device {device}", f"cpu, or one of {count} GPUs of CUDA here", _EXAMPLE)
    return torch.device("cuda", index)


_TABLES = ("_parameters", "_buffers", "_modules")


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """One replica of `module` for each device; the first is `module` itself.

    Shared parameters and modules stay shared inside each replica. References to them in lists,
    tuples and dicts of attributes, and in bound methods, point to the replica's own. What a
    forward pass changes persists in replica 0; in the other replicas it is lost with them.

    A hook is called with the replica as its module. A closure that refers to the original module
    is not changed: it acts on replica 0.

    Raises:
        InputError: wrong devices; a parameter or buffer that is not on the first device.
    """
    first, *rest = as_devices(devices)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device != first:
            given = f"{name} of the module on {tensor.device}, with {first} as the first device"
            raise bad(
                given, "a module whose tensors are all on the first device", f'.to("{first}")'
            )
    return [module, *(_replica(module, device) for device in rest)]


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    copies: dict[int, Tensor] = {}
    for p in module.parameters():
        copies[id(p)] = cast("Tensor", _Replicate.apply(p, device))
    for b in module.buffers():
        copies[id(b)] = b.detach().to(device, copy=True)
    parts = {id(part): type(part).__new__(type(part)) for part in module.modules()}

    def own(x: Any) -> Any:
        """The replica's counterpart of `x`."""
        if isinstance(x, Tensor):
            return copies[id(x)] if id(x) in copies else x.to(device, copy=True)
        if isinstance(x, MethodType):
            part = parts.get(id(x.__self__))
            return x if part is None else MethodType(x.__func__, part)
        return parts.get(id(x), x)

    kinds = (Tensor, nn.Module, MethodType)
    for old in module.modules():
        table = parts[id(old)].__dict__
        table.update({key: mapped(own, value, kinds) for key, value in vars(old).items()})
        table.update({key: dict(table[key]) for key in _TABLES})  # changed without the module's
    return parts[id(module)]


class _Replicate(torch.autograd.Function):
    """A copy on another device; its gradient, which may be sparse, is copied back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.source = x.device
        return x.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.source), None


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]] | None = None,
    devices: Devices | None = None,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs[i])` in a thread for every i; returns the outputs.

    An input that is no tuple is the only argument. Each thread has the caller's grad mode,
    inference mode, autocast and context variables, and its device's current stream. `devices`
    name the threads; by default each is the device of the first tensor among the inputs.

    All threads have ended when this function returns or raises. If replicas fail, the
    first error is raised unchanged, with a note that names the replica and its device.

    Raises:
        InputError: different numbers of modules, inputs, kwargs and devices.
    """
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
        """Call `module` in this state, in the thread of `device`."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.graded))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cached))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            return module(*args, **kwargs)


def _device(part: tuple[nn.Module, Any, Any]) -> torch.device:
    module, *inputs = part
    tensors = [*leaves(inputs, Tensor), *module.parameters()]
    return tensors[0].device if tensors else torch.device("cpu")


def choose_vector_functions() -> None:
    """One thread chooses torch's vector functions (sin, exp): in the first call, during which calls
    of other threads have errors of 1e-8.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(8, dtype=dtype, device="cpu").sin().exp()


def scatter(x: Any, devices: Devices, dim: int = 0) -> list[Any]:
    """Split every tensor in `x` along `dim`, and copy part i to device i.

    With n devices and N rows, the first N mod n devices get one row more. Tensors with too few
    dims to have `dim` (a number, for example) are copied whole to every device; what is no tensor
    is passed on. Returns one object of the structure of `x` for each device.

    Raises:
        InputError: tensors with different numbers of rows, none with rows, or fewer than devices.
    """
    targets = as_devices(devices)
    _require_rows(x, dim, len(targets))
    split: dict[int, tuple[Tensor, ...]] = {}
    for tensor in leaves(x, Tensor):
        if tensor.dim() > dim and id(tensor) not in split:
            split[id(tensor)] = tensor.tensor_split(len(targets), dim)

    def part(tensor: Tensor, i: int) -> Tensor:
        own = split[id(tensor)][i] if id(tensor) in split else tensor
        return own.to(targets[i], non_blocking=True)

    return [mapped(lambda t, i=i: part(t, i), x, Tensor) for i in range(len(targets))]


def _require_rows(x: Any, dim: int, devices: int) -> None:
    shapes = [tuple(t.shape) for t in leaves(x, Tensor) if t.dim() > dim]
    sizes = {shape[dim]: shape for shape in shapes}
    if not sizes:
        given = f"inputs without a tensor that has dim {dim}"
        raise bad(given, "at least one tensor, whose rows are split", "module.module(...)")
    if len(sizes) > 1:
        one, other = list(sizes.values())[:2]
        raise bad(
            f"inputs of shapes {one} and {other}, which have different sizes in dim {dim}",
            f"tensors with one number of rows in dim {dim}, or numbers, which every device gets",
            "mask.expand(len(x), -1, -1) for a mask that all rows share",
        )
    (count,) = sizes
    if count < devices:
        raise bad(
            f"{count} rows for {devices} devices",
            "at least one row for each device",
            "drop_last=True in the DataLoader, or fewer devices",
        )


def gather(outputs: list[Any], device: str | int | torch.device, dim: int = 0) -> Any:
    """Concatenate the outputs' tensors along `dim` on `device`; returns the structure of each.

    Tensors with too few dims to have `dim` are stacked: n losses become a tensor of shape [n].
    (Their mean is the batch's mean only if all devices had the same number of rows.)  What is no
    tensor must be equal in all outputs.

    Raises:
        InputError: no outputs, or outputs that differ in structure or in other values.
    """
    if not outputs:
        raise bad("gather of no outputs", "one output for each device", "gather([y0, y1], device)")
    (target,) = as_devices([device])
    forms = [_form(output) for output in outputs]
    other = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        raise bad(
            f"output {other}, {forms[other]}, beside output 0, {forms[0]} (tensors are numbered)",
            "outputs that differ in their tensors only",
            "a forward that returns tensors in one structure, whatever the rows are",
        )
    numbered = [leaves(output, Tensor) for output in outputs]
    together = iter([_joined(parts, target, dim) for parts in zip(*numbered, strict=True)])
    return mapped(lambda _: next(together), outputs[0], Tensor)


def _form(output: Any) -> Any:
    numbers = iter(range(len(leaves(output, Tensor))))
    return mapped(lambda _: f"tensor {next(numbers)}", output, Tensor)


def _joined(parts: tuple[Tensor, ...], device: torch.device, dim: int) -> Tensor:
    moved = [part.to(device, non_blocking=device.type == "cuda") for part in parts]
    return torch.cat(moved, dim) if moved[0].dim() > dim else torch.stack(moved)
