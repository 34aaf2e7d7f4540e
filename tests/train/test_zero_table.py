"""`predict --zero-table`: ZeRO's table 1."""

import pytest

from shardwise.cli.zero_table import gigabytes, zero_table

# ZeRO, arXiv 1910.02054, table 1, as printed: GB a device under P_os, P_os+g, P_os+g+p.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


@pytest.mark.parametrize("n", TABLE_1)
def test_the_papers_table_to_the_digit(n: int):
    """Every figure of the paper's table is printed with the paper's digits."""
    lines = zero_table([7.5e9, 128e9, 1e12], [n])
    assert tuple(" ".join(map(gigabytes, line.stored_bytes)) for line in lines) == TABLE_1[n]


def test_figure_1():
    """Of 7.5 billion parameters on 64 ranks: 120 GB without ZeRO, then 31.4, 16.6 and 1.9."""
    (before,) = zero_table([7.5e9], [1])
    (line,) = zero_table([7.5e9], [64])
    assert before.stored_bytes == (120e9, 120e9, 120e9)
    assert [round(n / 1e9, 1) for n in line.stored_bytes] == [31.4, 16.6, 1.9]
