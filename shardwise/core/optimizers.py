"""Bytes that optimizers store for each parameter of a model trained in 16 bits.

    optimizer     master  states                             K      source
    sgd           4       -                                  4      torch.optim.SGD
    momentum      4       4                                  8      torch.optim.SGD(momentum=0.9)
    adam          4       4 + 4                              12     arXiv 1412.6980; adamw the same
    lion          4       4                                  8      arXiv 2302.06675
    adafactor     4       4 (r + c) / (r c) of [r, c]        4.00   arXiv 1804.04235, no momentum
    adam-8bit     4       1 + 1 + 2 * 4 / 2048               6.00   arXiv 2110.02861, section 2.1
    momentum-8bit 4       1 + 4 / 2048                       5.00   the same
    lion-8bit     4       1 + 4 / 2048                       5.00   the same states for Lion

K is in bytes. ZeRO (arXiv 1910.02054, section 3.1) adds 2 bytes of weight and 2 of gradient, and
shards the three: with n ranks a device stores

    P_os        4 + K / n                zero1
    P_os+g      2 + (2 + K) / n          zero2
    P_os+g+p    (4 + K) / n              zero3
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Final

from shardwise.core.errors import bad
from shardwise.core.suggest import suggest
from shardwise.core.zero import ROWS, bytes_per_parameter

#: Elements that share one fp32 scale in an 8-bit state (arXiv 2110.02861, section 2.1).
QUANTIZATION_BLOCK: Final = 2048
_SCALE: Final = 4 / QUANTIZATION_BLOCK


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that an optimizer stores for each element of a parameter.

    `states` has an entry for each state tensor of the parameter's size. `factored`: besides, one
    fp32 mean for each row and each column of a matrix.
    """

    states: tuple[float, ...]
    factored: bool = False
    master: float = 4

    def bytes(self, rows: int, columns: int) -> float:
        """K for an element of a matrix [rows, columns]."""
        means = 4 * (rows + columns) / (rows * columns) if self.factored else 0
        return self.master + sum(self.states) + means


OPTIMIZERS: Final[dict[str, OptimizerBytes]] = {
    "sgd": OptimizerBytes(()),
    "momentum": OptimizerBytes((4,)),
    "adam": OptimizerBytes((4, 4)),
    "adamw": OptimizerBytes((4, 4)),
    "lion": OptimizerBytes((4,)),
    "adafactor": OptimizerBytes((), factored=True),
    "adam-8bit": OptimizerBytes((1 + _SCALE, 1 + _SCALE)),
    "momentum-8bit": OptimizerBytes((1 + _SCALE,)),
    "lion-8bit": OptimizerBytes((1 + _SCALE,)),
}

#: The matrix whose K is printed: 4096 rows and columns, as in a model of 7 billion parameters.
SIDE: Final = 4096
STAGES: Final = ("zero1", "zero2", "zero3")


def k_bytes(name: str, side: int = SIDE) -> float:
    """K of an optimizer for the elements of a square matrix. Raises InputError for another name."""
    if name not in OPTIMIZERS:
        raise bad(f"the optimizer '{name}'", ", ".join(OPTIMIZERS), suggest(name, OPTIMIZERS))
    return OPTIMIZERS[name].bytes(side, side)


@dataclass(frozen=True)
class ZeroLine:
    """Bytes that each of `ranks` data ranks stores of a model under zero1, zero2 and zero3."""

    parameters: float
    ranks: int
    stored_bytes: tuple[float, float, float]


def zero_table(parameters: list[float], ranks: list[int], optimizer: str) -> Iterator[ZeroLine]:
    """ZeRO's table 1 (arXiv 1910.02054): a line for each number of ranks and each model."""
    k = k_bytes(optimizer)
    for n in ranks:
        for count in parameters:
            each = [count * bytes_per_parameter(ROWS[s], n, optim_bytes=k) for s in STAGES]
            yield ZeroLine(count, n, (each[0], each[1], each[2]))


def gigabytes(stored_bytes: float) -> str:
    """Bytes in GB as the paper prints them: 41.25 is 41.3, 1.875 is 1.88, 2218.75 is 2218.

    From 100 on the paper cuts the digits after the point off; below, it rounds half up.
    """
    gb = Decimal(stored_bytes) / 10**9
    places = Decimal(1) if gb >= 100 else Decimal("0.1") if gb >= 10 else Decimal("0.01")
    shown = gb.quantize(places, ROUND_DOWN if gb >= 100 else ROUND_HALF_UP)
    return f"{shown:f}".rstrip("0").rstrip(".") if "." in f"{shown:f}" else f"{shown:f}"
