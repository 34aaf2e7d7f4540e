"""The recorder of a tape: the storages that autograd saves, and the products of a forward pass.

techniques/recompute/kept.py decides which products selective recomputation keeps.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.core.model_spec import Product, Taken, Tape
from shardwise.observe.work import attention_flops, call_tensors
from shardwise.techniques.recompute.kept import ATTENTION, is_kept, is_product


class TapeRecorder:
    """The tape so far. It keeps tensors alive, so that no new tensor gets the storage of one."""

    def __init__(self, external: Iterable[Any]) -> None:
        self.external = {_storage(x) for x in external if isinstance(x, Tensor)}
        self.numbers: dict[int, int] = {}
        self.storage_bytes: list[int] = []
        self.alive: list[Tensor] = []
        self.saved: dict[tuple[str, int], None] = {}
        self.taken: dict[Taken, None] = {}
        self.returned: dict[tuple[str, int], None] = {}
        self.products: list[Product] = []
        self.made_by: dict[int, int] = {}  # storage -> the product whose output it is
        self.saves = 0
        self.last_save: dict[str, int] = {}

    def done(self) -> Tape:
        pairs = tuple(self.saved), tuple(self.taken), tuple(self.returned)
        last = tuple(self.last_save.items())
        self.alive.clear()
        return Tape(tuple(self.storage_bytes), *pairs, tuple(self.products), last)

    def save(self, x: Tensor, module: str) -> None:
        self.saves += 1
        self.last_save[module] = self.saves
        self._note(self.saved, module, x)

    def take(self, module: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            number = self._number(x)
            if number is not None:
                taken = Taken(module, number, x.numel(), x.element_size(), x.requires_grad)
                self.taken[taken] = None

    def give(self, module: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self._note(self.returned, module, x)

    def operation(
        self, module: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Record an operation below autograd: a product, or one that writes to its output."""
        if is_product(func):
            if func in ATTENTION:
                flops = attention_flops(*args[:3])
            else:
                flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            kept = call_tensors(out) if is_kept(func, args, kwargs, out) else []
            self._product(module, flops, kept, self.saves)
        elif func._schema.is_mutable and self.made_by:
            for x in call_tensors((args, kwargs)):
                place = self.made_by.get(self.numbers.get(_storage(x), -1))
                if place is not None:
                    self.products[place] = self.products[place]._replace(storages=())

    def attention(
        self, module: str, arguments: tuple[Tensor, Tensor, Tensor], out: Tensor, saves: int
    ) -> None:
        """Record a fused attention, computed after `saves` saves; it saves its outputs."""
        made = [out] if out.grad_fn is None else getattr(out.grad_fn, "saved_tensors", (out,))[3:]
        self._product(module, attention_flops(*arguments), made, saves)

    def _product(self, module: str, flops: int, kept: Iterable[Tensor], saves: int) -> None:
        storages = tuple(number for x in kept if (number := self._number(x)) is not None)
        self.made_by |= dict.fromkeys(storages, len(self.products))
        self.products.append(Product(module, flops, storages, saves))

    def _note(self, pairs: dict[tuple[str, int], None], module: str, x: Tensor) -> None:
        number = self._number(x)
        if number is not None:
            pairs[module, number] = None

    def _number(self, x: Tensor) -> int | None:
        key = _storage(x)
        if key in self.external:
            return None
        if key not in self.numbers:
            self.numbers[key] = len(self.storage_bytes)
            self.storage_bytes.append(x.untyped_storage().nbytes())
            self.alive.append(x.detach())
        return self.numbers[key]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
