"""The table of optimizers, and ZeRO's table 1 made from it."""

import pytest

from shardwise.core.optimizers import OPTIMIZERS, gigabytes, k_bytes, zero_table

# ZeRO, arXiv 1910.02054, table 1, as printed: GB a device under P_os, P_os+g, P_os+g+p.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
# Bytes that the sources state for an optimizer and its fp32 master, 8-bit scales apart.
PUBLISHED_K = {"sgd": 4, "momentum": 8, "adam": 12, "adamw": 12, "lion": 8, "adafactor": 4}
PUBLISHED_K |= {"adam-8bit": 6, "momentum-8bit": 5, "lion-8bit": 5}


@pytest.mark.parametrize("n", TABLE_1)
def test_the_papers_table_to_the_digit(n: int):
    """Every figure of the paper's table is printed as it is in the paper."""
    lines = zero_table([7.5e9, 128e9, 1e12], [n], "adam")
    assert tuple(" ".join(map(gigabytes, line.stored_bytes)) for line in lines) == TABLE_1[n]


def test_figure_1():
    """Of 7.5 billion parameters on 64 ranks: 120 GB without ZeRO, then 31.4, 16.6 and 1.9."""
    (before,) = zero_table([7.5e9], [1], "adam")
    (line,) = zero_table([7.5e9], [64], "adam")
    assert before.stored_bytes == (120e9, 120e9, 120e9)
    assert [round(n / 1e9, 1) for n in line.stored_bytes] == [31.4, 16.6, 1.9]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_each_optimizer(name: str):
    """K is what its source says; means of rows, columns and blocks add less than 0.01 byte."""
    assert PUBLISHED_K[name] <= k_bytes(name) < PUBLISHED_K[name] + 0.01


def test_means_of_rows_and_columns_count_in_small_matrices():
    """Adafactor's means of a [2, 4] matrix: 6 numbers of 4 bytes for 8 elements."""
    assert OPTIMIZERS["adafactor"].bytes(2, 4) == 4 + 4 * 6 / 8
