"""For the judge of the suite (tests/mutants.py): puts the fault of `VARIABLE` into this process.

A plugin of pytest (`-p tests.mutated`), which the processes that ranks are forked from import too.
"""

import importlib.machinery
import os
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mechanical import PACKAGE, VARIABLE, with_fault


def put_in(name: str) -> None:
    """A fault of the catalogue; or a drawn one, with which its file is compiled when imported."""
    patch = pytest.MonkeyPatch()
    if " | " not in name:
        from tests.verify.test_mutations import NAMED

        NAMED[name].apply(patch)
        return
    file, real = PACKAGE / name.partition(":")[0], importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: Any, module: str) -> CodeType | None:
        if Path(loader.get_filename(module)) != file:
            return real(loader, module)
        return compile(with_fault(file, name), str(file), "exec", dont_inherit=True)

    patch.setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)


if VARIABLE in os.environ:
    put_in(os.environ[VARIABLE])
