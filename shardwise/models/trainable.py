"""This file is a model with what it takes to train it: its loss, its batches, its name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Loss = Callable[[nn.Module, Any], Tensor]
Initial = Callable[[str, Tensor, int], None]


@dataclass(frozen=True)
class Trainable:
    """Something `shardwise` can train, prove or measure, found by its name.

    `make()` gives the module on the device that is the default when it is called, the same weights
    each time. `loss(model, batch)` is the mean over the batch's own tokens. `tokens(batch)` counts
    them; None where every row weighs the same. `make_batch(rows, seed)` gives a pytree of tensors
    whose dim 0 has `rows` entries. `initial(name, tensor, seed)` fills one parameter, where the
    model can be made on the meta device and filled later.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Loss
    make_batch: Callable[[int, int], Any]
    tokens: Callable[[Any], int] | None = None
    initial: Initial | None = None

    def build(self, device: torch.device | str = "cpu") -> nn.Module:
        """The module on `device`, in training mode, with the same weights on every call.

        On "meta" it has shapes and no weights. Elsewhere it is made on the processor and moved,
        so that its weights do not depend on the device.
        """
        if torch.device(device).type == "meta":
            with torch.device("meta"):
                return self.make().train()
        return self.make().train().to(device)

    def batch(self, rows: int, seed: int, device: torch.device | str = "cpu") -> Any:
        """A batch of `rows` rows, a function of rows and seed alone, on `device`."""
        made = self.make_batch(rows, seed)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), made)
