"""Precision: which parameters a precision casts, and which inputs.

    batch             reaches the loss function unchanged; under fp64 its floats are widened
    parameters        have the dtype, except those of norms with running statistics, which need
                      fp32 (torch refuses them in 16 bits)
    inputs of layers  are cast to the dtype of the layer's parameters: of modules of torch.nn, of
                      modules without others inside, and of modules with a matrix of their own;
                      under fp32 where parameters were cast, or a batch has wider floats
    buffers           keep their dtype; under fp64 they are widened

So time steps and coordinates are rounded only where a layer takes them.  What the code computes
with them outside of layers has their precision: torch promotes.  A norm with statistics takes 16
bits and gives 16 bits, and computes in fp32 (Micikevicius et al., arXiv 1710.03740, section 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from shardwise.core.tools.tree import mapped

#: The dtype of each precision; None for the parameters' own.
DTYPES = {
    None: None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
HALF = (torch.bfloat16, torch.float16)
#: Modules of torch.nn that only call those inside of them.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def kept_in_fp32(module: nn.Module) -> bool:
    """Whether the module's own parameters keep 32 bits in a precision of 16 bits."""
    return isinstance(module, _NormBase) or "running_mean" in module._buffers


def param_dtypes(
    model: nn.Module, dtype: torch.dtype
) -> Iterator[tuple[nn.Parameter, torch.dtype]]:
    """The floating-point parameters of `model`, each with its dtype in this precision."""
    wide = torch.float32 if dtype in HALF else dtype
    kept = {p for m in model.modules() if kept_in_fp32(m) for p in m.parameters(recurse=False)}
    for p in model.parameters():
        if p.is_floating_point():
            yield p, wide if p in kept else dtype


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """Cast the inputs of the layers of `model` to `dtype`; the handles remove the hooks.
    Under fp64 nothing is cast: the batch is widened instead.
    """
    if dtype is torch.float64:
        return []
    return [
        module.register_forward_pre_hook(InputCast(dtype), with_kwargs=True)
        for module in model.modules()
        if _takes_cast_inputs(module)
        and not any(isinstance(hook, InputCast) for hook in module._forward_pre_hooks.values())
    ]


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Its parameters, of which none is gathered, as in a loop of the program (reads.py)."""
    return [p for p in dict.values(module._parameters) if p is not None]


def _takes_cast_inputs(module: nn.Module) -> bool:
    own = [p for p in _own(module) if p.is_floating_point()]
    if kept_in_fp32(module) or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
        return any(p.is_floating_point() for m in module.modules() for p in _own(m))
    alone = not any(map(_own, [*module.modules()][1:]))
    return bool(own) and (alone or any(p.dim() > 1 and 1 not in p.shape for p in own))


@dataclass(frozen=True)
class InputCast:
    """A hook that casts real floating-point tensors in the arguments of a call; copied with it."""

    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            x = args[0]  # the usual call, quickly
            return None if x.dtype == self.dtype else ((self._cast(x),), kwargs)
        return mapped(self._cast, args, Tensor), mapped(self._cast, kwargs, Tensor)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() and x.dtype != self.dtype else x
