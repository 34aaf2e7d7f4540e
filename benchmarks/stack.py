"""A stack of square linear layers with about a given number of parameters, and that number as text.

The suites `update`, `disk` and `save` use it: what they measure depends on the number alone.
"""

import re
from math import isqrt
from typing import Final

import torch
from torch import nn

from shardwise.core.errors import bad

_WIDTH: Final = 2048
_SIZE: Final = re.compile(r"([1-9]\d*)([KM]?)")
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6}


def parameter_count(text: str, instead: str) -> int:
    """The number that "100M", "20K" or "5000" says. Raises InputError for other text."""
    found = _SIZE.fullmatch(text)
    if found is None or not 64 <= int(found[1]) * _UNITS[found[2]] <= 10**10:
        allowed = "a number of parameters from 64 to 10000M: digits, then K, M or nothing"
        raise bad(f"--size {text}", allowed, f"--size {instead}")
    return int(found[1]) * _UNITS[found[2]]


def stack(count: int) -> nn.Sequential:
    """Layers without biases, at least 4 unless `count` is too small, the same in each call."""
    width = min(_WIDTH, isqrt(max(1, count // 4)))
    layers = max(1, round(count / width**2))
    own = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.02, generator=own)
    return model
