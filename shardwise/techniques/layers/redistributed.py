"""Activations with the rows of another tensor degree than the model around them.

y = layer_a(x)      rows are gathered before layer_a; y keeps them gathered
z = layer_b(y)      a layer of the same mesh takes y with these rows: nothing is sent
z + 1               any other operation first takes this rank's own rows
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.kernels.logits import DESCRIBED
from shardwise.techniques.layers.exchange import RowExchange


class Redistributed(Tensor):
    """A tensor [rows, ...] with the rows at tensor degree `degree`, made by the layer `layer`.

    Its shape is that of this rank's own rows, and every torch function gets these. `computed_from`
    is the tensor with all rows.
    """

    exchange: RowExchange
    degree: int
    layer: str
    own: Tensor | None
    version: int

    @staticmethod
    def of(x: Tensor, exchange: RowExchange, degree: int, layer: str) -> "Redistributed":
        """`x` with the rows at `degree`, made by `layer`; nothing is copied."""
        out = x.as_subclass(Redistributed)
        out.exchange, out.degree, out.layer = exchange, degree, layer
        out.own, out.version = None, 0
        return out

    @property
    def computed_from(self) -> Tensor:
        """The tensor with the rows at `degree`, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def plain(self) -> Tensor:
        """This rank's own rows."""
        exchange, whole = self.exchange, self.computed_from
        if self.own is None or self._lacks_graph(self.own, whole):
            self.own = exchange.move(whole, self.degree, exchange.base, self.layer)
            self.version = self.own._version
        return self.own

    def _lacks_graph(self, own: Tensor, whole: Tensor) -> bool:
        """Whether `own` was taken under no_grad, and is read now where autograd records."""
        records = torch.is_grad_enabled() and whole.requires_grad
        return records and not own.requires_grad and own._version == self.version

    def at(self, degree: int) -> Tensor:
        """The rows at another degree, by one move."""
        if self.own is not None and self.own._version != self.version:  # changed in place
            return self.exchange.move(self.own, self.exchange.base, degree, self.layer)
        return self.exchange.move(self.computed_from, self.degree, degree, self.layer)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ == "__get__" and owner == "shape":
            return _shape(args[0])
        if func.__name__ == "__get__" and owner in DESCRIBED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if func is Tensor.size and len(args) == 1 and not kwargs:
            return _shape(args[0])
        return func(*plain(args), **plain(kwargs))


def _shape(x: Redistributed) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Size((x.exchange.held(x.exchange.base), *x.shape[1:]))


def plain(inputs: Any) -> Any:
    """`inputs` with this rank's own rows in place of each Redistributed."""
    return tree_map(lambda x: x.plain() if isinstance(x, Redistributed) else x, inputs)
