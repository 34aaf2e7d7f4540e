"""The tape of a forward pass: what autograd keeps of it for the backward pass, and its products.

Storages are numbered in the order in which they were first seen. Those of parameters, buffers and
the batch have no number: they stay in memory in any case.

    saved        autograd saved the storage in the forward of this module, the innermost running
    taken        the module takes a tensor of it as an argument
    returned     the module returns it

`operations` are those of the forward and of the backward pass, from which a step's time follows.
"""

from typing import Final, NamedTuple

#: With activations in host memory, storages of fewer bytes stay on the device.
SMALL_BYTES: Final = 1024


class Product(NamedTuple):
    """A matrix product, a convolution or fused attention in the forward of `module`.

    `flops` are those that torch's FlopCounterMode counts. `storages` has its outputs, and is empty
    where selective recomputation computes them again. `saves` tensors had been saved before it.
    """

    module: str
    flops: int
    storages: tuple[int, ...]
    saves: int


class Taken(NamedTuple):
    """An argument of a module. `trained`: a gradient reaches it."""

    module: str
    storage: int
    numel: int
    element_bytes: int
    trained: bool


class Operation(NamedTuple):
    """A kernel that computes for `module`, in the forward or in the backward pass.

    dtype        of its largest input, by torch's name
    flops        of a product, as torch's FlopCounterMode counts
    done_flops   those that the kernel computes: causal attention computes half of them
    moved_bytes  of the tensors that it reads and writes
    saves        how many tensors autograd had saved before it
    product      its place among the products of the tape; -1 for others
    """

    module: str
    backward: bool
    dtype: str
    flops: int
    done_flops: int
    moved_bytes: int
    saves: int = 0
    product: int = -1


class Tape(NamedTuple):
    """What autograd keeps of one forward pass. `last_save` counts the saves up to a module's last.

    `storage_bytes` has the bytes of each storage; the pairs are of a module and a storage.
    """

    storage_bytes: tuple[int, ...] = ()
    saved: tuple[tuple[str, int], ...] = ()
    taken: tuple[Taken, ...] = ()
    returned: tuple[tuple[str, int], ...] = ()
    products: tuple[Product, ...] = ()
    last_save: tuple[tuple[str, int], ...] = ()
    operations: tuple[Operation, ...] = ()
