"""A mutation of the catalogue in this process, for tests/mutants.py.

Imported by the processes of a test run, their ranks among them, where `VARIABLE` names a mutation.
"""

import os
from typing import Any

import pytest

from tests.verify.test_mutations import NAMED

VARIABLE = "SHARDWISE_TESTS_MUTATION"


def apply(name: str) -> pytest.MonkeyPatch:
    """Put the mutation into this process."""
    patch = pytest.MonkeyPatch()
    NAMED[name].apply(patch)
    return patch


def modules_of(patch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are patched, or whose classes are."""
    owners: list[Any] = [owner for owner, *_ in patch._setattr]
    return [getattr(owner, "__module__", None) or owner.__name__ for owner in owners]


if VARIABLE in os.environ:
    apply(os.environ[VARIABLE])
