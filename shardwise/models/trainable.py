"""A model with its loss, its batches and its name, and initial weights by the parameters' names.

Each parameter has its own generator, seeded by a hash of seed and full name.  So initial weights do
not depend on the order in which modules are made, the number of ranks, or the sharding: a rank that
materialises one block of a model on the meta device gets exactly the weights of a single process.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm.tiers.host_memory import free_bytes
from shardwise.core.errors import bad

FEW_ROWS: Final = 2
MOST_BYTES: Final = 2**31  # of a batch
WEIGHT_BYTES: Final = 4  # a model is built in fp32
Loss = Callable[[nn.Module, Any], Tensor]
Initial = Callable[[str, Tensor, int], None]


@dataclass(frozen=True)
class Trainable:
    """A model that `shardwise` can train, prove or measure.

    make        make() returns the module on the current default device, with the same weights on
                each call
    loss        loss(model, batch) is the mean over the batch's tokens
    make_batch  make_batch(rows, seed) returns a pytree of tensors with `rows` entries in dim 0
    tokens      tokens(batch) counts the tokens; None: every row has the same weight
    initial     initial(name, tensor, seed) fills one parameter of a model on the meta device; None
                if it cannot be filled so
    on_meta     make() also works on the meta device, without weights
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Loss
    make_batch: Callable[[int, int], Any]
    tokens: Callable[[Any], float] | None = None
    initial: Initial | None = None
    on_meta: bool = False

    def build(self, device: torch.device | str = "cpu") -> nn.Module:
        """The module on `device`, in training mode, with the same weights on every call.
        It is made on the CPU and moved, so that its weights do not depend on the device; on "meta"
        it has no weights.  Raises InputError for a model that `make` returns on the meta device, if
        weights are asked, and for weights that do not fit the free memory of this host.
        """
        if torch.device(device).type == "meta":
            with torch.device("meta"):
                return self.make().train()
        self.require_memory(WEIGHT_BYTES)
        made = self.make().train()
        if any(x.is_meta for x in (*made.parameters(), *made.buffers())):
            raise bad(
                f'the model "{self.name}" on the meta device, which has no weights',
                "a function that returns a model with weights",
                "the same function without torch.device('meta')",
            )
        return made.to(device)

    def plain(self) -> nn.Module:
        return self.build("meta") if self.shapes_suffice else self.make().train()

    @property
    def shapes_suffice(self) -> bool:
        return self.on_meta or self.initial is not None

    def require_memory(self, bytes_a_parameter: int) -> None:
        """Raise InputError unless this host has so many bytes free for each parameter."""
        if not self.shapes_suffice:
            return
        count = sum(p.numel() for p in self.plain().parameters())
        needed, free = count * bytes_a_parameter, free_bytes()
        if needed > free:
            raise bad(
                f'the model "{self.name}" with weights: {count:,} parameters at '
                f"{bytes_a_parameter} bytes take {needed / 2**30:,.1f} GiB, and this host has "
                f"{free / 2**30:,.1f} GiB free",
                "a smaller model here; `shardwise predict` and `shardwise table` need no weights",
                'shardwise predict "dp64 zero3 bf16", with the same --model or --config',
            )

    def batch(self, rows: int, seed: int, device: torch.device | str = "cpu") -> Any:
        """A batch of `rows` rows, by rows and seed. Raises InputError for over MOST_BYTES."""
        if rows > FEW_ROWS:
            few = self.make_batch(FEW_ROWS, seed)
            require_room(f"a batch of {rows} rows of the model {self.name}", few, rows / FEW_ROWS)
        made = self.make_batch(rows, seed)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), made)


def require_room(what: str, batch: Any, times: float) -> None:
    """Raise InputError if a batch of `times` the size of this one exceeds MOST_BYTES."""
    one = sum(x.nbytes for x in pytree.tree_leaves(batch) if isinstance(x, Tensor))
    if one * times > MOST_BYTES:
        raise bad(
            f"{what}, whose tensors take {one * times:.3g} bytes",
            f"a batch of up to {MOST_BYTES:,} bytes",
            "fewer rows (--batch), shorter rows (--sequence) or fewer microbatches",
        )


# --- initial weights ------------------------------------------------------------------------------

#: Matrices whose output is added to the residual stream, two per layer.
WRITERS: Final = ("attn.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


@torch.no_grad()
def initial(name: str, tensor: Tensor, seed: int) -> None:
    """Fill the full, unsharded parameter `name` in place. Vectors are norm scales (1) or biases
    (0).  Matrices [out, in], and stacked ones [experts, out, in], are normal with variance 1/in, so
    that a normalised input gives outputs of variance one; those that write to the residual stream
    are smaller by sqrt(2·layer), so that the stream does not grow with depth (GPT-2, section 2.3).
    The embedding and the head are normal with standard deviation 0.02. Drawn on the CPU in fp32 and
    then copied, so that device and precision of `tensor` only change the rounding.
    """
    if tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    draw = torch.empty(tensor.shape, dtype=torch.float32)
    draw.normal_(0.0, deviation(name, tensor.shape), generator=generator(name, seed))
    tensor.copy_(draw)


def deviation(name: str, shape: torch.Size) -> float:
    """The initial standard deviation of the matrix `name` with `shape`."""
    if name.endswith(("embed.weight", "head.weight")):
        return 0.02
    plain = 1 / math.sqrt(shape[-1])
    layer = re.search(r"\bblocks\.(\d+)\.", name)
    if layer is None or not name.endswith(WRITERS):
        return plain
    return plain / math.sqrt(2 * (int(layer.group(1)) + 1))


def generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: the range of manual_seed in every supported version of torch
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def fill(model: nn.Module, seed: int) -> None:
    for name, parameter in model.named_parameters():
        initial(name, parameter, seed)


def without_decay(model: nn.Module, decayed: set[str]) -> dict[str, dict[str, Any]]:
    """Patterns of the names that are not `decayed`: one for the same weight of all layers.
    A pattern that would match a decayed name too is written out as the names.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in decayed:
            continue
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        exact = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        clash = any(exact.fullmatch(other) for other in decayed)
        found[name if clash else pattern] = {"weight_decay": 0.0}
    return found
