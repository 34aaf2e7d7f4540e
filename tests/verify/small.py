"""A GPT of two narrow blocks, for commands that take the name of a file: `small.py:build`."""

from typing import Any

from shardwise.models import gpt, registry

SIZES = gpt.GPTConfig(vocabulary=32, layers=2, width=16, heads=4, kv_heads=2, hidden=24, sequence=8)


def build() -> tuple[Any, ...]:
    found = registry.of_sizes("small", SIZES)
    return found.build(), found.loss, found.batch
