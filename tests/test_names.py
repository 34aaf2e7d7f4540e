"""The public names of the package, which test_surface freezes.

What a name does is tested where it lives.
"""

import subprocess
import sys

import pytest

import shardwise as sw


def test_dir_gives_the_public_names() -> None:
    """`from shardwise import *` and `dir` give the same names, and the version."""
    assert sorted(dir(sw)) == sorted([*sw.__all__, "__version__"])


@pytest.mark.parametrize("name", sw.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """A name is found where the table says that it lives, with a word about what it is."""
    assert getattr(sw, name).__doc__


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    """As of any module: `hasattr` works."""
    assert not hasattr(sw, "DataParallelism")


def test_importing_the_package_does_not_import_torch() -> None:
    """Torch takes seconds, and plans, meshes and errors need none of it."""
    code = (
        "import sys, shardwise as sw\n"
        "sw.Plan.parse('dp2 zero3'), sw.Mesh.parse('dp2'), sw.core.S(0), sw.InputError\n"
        "sw.Table.of({})\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
