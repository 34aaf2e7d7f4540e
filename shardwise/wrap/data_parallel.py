"""`sw.DataParallel`: one process, one thread for each device, a replica made in each forward pass.

                 scatter          replicate        parallel_apply        gather
    inputs --->  rows 0..3   --->  module      --->  thread 0       --->
                 rows 4..6   --->  copy on d1  --->  thread 1       --->  outputs on d0

(Krizhevsky, "One weird trick", arXiv 1404.5997, splits the batch so; the four operations are those
of torch.nn.parallel.)
"""

from typing import Any

import torch
from torch import nn

from shardwise.core.errors import bad
from shardwise.core.tools import arguments
from shardwise.core.tools.structure import graph_break
from shardwise.engine.checks import validate
from shardwise.engine.checks.validate import without_compiler
from shardwise.techniques.data.apply import drivers
from shardwise.techniques.replicas.replicate import (
    Devices,
    as_devices,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from shardwise.wrap.unwrap import Wrapper, no_wrapper


class DataParallel(nn.Module, Wrapper):
    """Compute `module` on several devices of this process, each on its rows of the inputs.

        model = sw.DataParallel(model, devices=["cuda:0", "cuda:1"])
        loss_fn(model(inputs), targets).backward()

    devices: one for each replica; by default every GPU.  The module is moved to the first of them,
    where the outputs and all gradients are.  "cpu" may be given several times.
    dim: the dim of inputs and outputs that counts the rows.

    Outputs and gradients equal the plain module's if its rows do not depend on each other and it
    draws no random numbers.  Batch norm normalises each replica's rows by themselves; running
    statistics, and whatever else a forward pass changes, are those of replica 0.  Dropout draws
    other masks than the plain module: on processors all threads draw from one generator, in any
    order, so a seed does not fix them.

    `state_dict` has the plain module's keys; `.module`, or sw.unwrap, is the plain module.

    Raises:
        InputError: wrong devices; a module that is wrapped or scripted; for a call, what
            `scatter` and `gather` raise.
    """

    axis = None

    def __init__(self, module: nn.Module, devices: Devices | None = None, dim: int = 0) -> None:
        super().__init__()
        module = require_replicable(module)
        arguments.integer("dim", dim, 0, 0)
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if devices is None and not gpus:
            allowed = "devices=[...], one for each replica"
            raise bad("no devices, where PyTorch sees no GPU", allowed, 'devices=["cpu", "cpu"]')
        self.devices = as_devices(gpus if devices is None else devices)
        self.device, self.dim = torch.device(self.devices[0]), dim
        validate.no_max_norm(module, len(self.devices))
        self.module = module.to(self.devices[0])
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    @graph_break
    def forward(self, *args: object, **kwargs: object) -> Any:
        """The module's output for all rows, on the first device."""
        parts = scatter((args, kwargs), self.devices, self.dim)
        replicas = replicate(self.module, self.devices)
        inputs, options = [part[0] for part in parts], [part[1] for part in parts]
        outputs = parallel_apply(replicas, inputs, options, self.devices)
        return gather(outputs, self.devices[0], self.dim)

    def unwrap(self) -> nn.Module:
        return self.module

    def counted_elsewhere(self) -> set[nn.Parameter]:
        return set()


def require_replicable(module: nn.Module) -> nn.Module:
    """The module without torch.compile.  Raises InputError if no replicas can be made of it."""
    validate.model(module, "sw.DataParallel")
    module = without_compiler(module, "sw.DataParallel")
    no_wrapper(module)
    if any(drivers(part) for part in module.modules()):
        raise validate.already_wrapped(module)
    return module


_OWN = "module."


def _without_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = f"{prefix}{_OWN}"
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _with_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{_OWN}{key.removeprefix(prefix)}"] = state.pop(key)
