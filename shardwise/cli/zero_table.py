"""`predict --zero-table`: ZeRO's table 1 (arXiv 1910.02054), for any number of parameters."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from rich.console import Console
from rich.table import Table

from shardwise.core.errors import bad
from shardwise.core.zero import ROWS, bytes_per_parameter

#: Bytes of fp32 weight, mean and variance that Adam stores for a parameter: K of the paper.
K_BYTES = 12
RANKS = (1, 4, 16, 64, 256, 1024)
MOST_PARAMETERS = 1e18
STAGES = {"zero1": "P_os", "zero2": "P_os+g", "zero3": "P_os+g+p"}


@dataclass(frozen=True)
class ZeroLine:
    """Bytes that each of `ranks` data ranks stores of a model under zero1, zero2 and zero3."""

    parameters: float
    ranks: int
    stored_bytes: tuple[float, ...]


def print_zero_table(text: str, console: Console, *, as_json: bool) -> None:
    """Print the table for models of these numbers of parameters, 7.5e9,128e9 for instance.

    Raises InputError for text that is no numbers.
    """
    try:
        counts = [float(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= n <= MOST_PARAMETERS for n in counts):
        allowed = f"numbers from 1 to {MOST_PARAMETERS:g}, with commas between them"
        raise bad(f"--zero-table {text}", allowed, "--zero-table 7.5e9,128e9")
    lines = list(zero_table(counts, RANKS))
    if as_json:
        print(json.dumps({"k_bytes": K_BYTES, "zero_table": [_as_json(line) for line in lines]}))
        return
    heads = [f"{paper} ({word})" for word, paper in STAGES.items()]
    title = f"GB a rank: 16-bit weights and gradients, adam with K = {K_BYTES} bytes"
    table = Table("parameters", "ranks", *heads, title=title)
    for line in lines:
        cells = map(gigabytes, line.stored_bytes)
        table.add_row(f"{line.parameters:g}", f"{line.ranks}", *cells)
    console.print(table)
    console.print("ZeRO, arXiv 1910.02054, table 1; 1 GB is 1e9 bytes; activations come on top.")


def zero_table(parameters: Sequence[float], ranks: Sequence[int]) -> Iterator[ZeroLine]:
    """A line for each number of ranks and each model, with Adam."""
    for n in ranks:
        each = [bytes_per_parameter(ROWS[stage], n, optim_bytes=K_BYTES) for stage in STAGES]
        for count in parameters:
            yield ZeroLine(count, n, tuple(count * stored for stored in each))


def gigabytes(stored_bytes: float) -> str:
    """Bytes in GB as the paper prints them: 41.25 is 41.3, 1.875 is 1.88, 2218.75 is 2218.

    From 100 on the paper cuts the digits after the point off; below, it rounds half up.
    """
    gb = Decimal(stored_bytes) / 10**9
    places = Decimal(1) if gb >= 100 else Decimal("0.1") if gb >= 10 else Decimal("0.01")
    shown = gb.quantize(places, ROUND_DOWN if gb >= 100 else ROUND_HALF_UP)
    return f"{shown:f}".rstrip("0").rstrip(".") if "." in f"{shown:f}" else f"{shown:f}"


def _as_json(line: ZeroLine) -> dict[str, float]:
    stored = dict(zip(STAGES, line.stored_bytes, strict=True))
    return {"parameters": line.parameters, "ranks": line.ranks, **stored}
