"""The surface of the program is the one that is checked in."""

import subprocess
import sys
from dataclasses import fields
from inspect import signature

import shardwise as sw
from shardwise.engine.options import EngineOptions
from tests import surface
from tests.house import ROOT


def test_the_version_is_the_package_s() -> None:
    """Where a citation and the list of changes name it too."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {sw.__version__}\n" in citation
    assert f"\n## {sw.__version__}" in changes


def test_the_surface_is_the_one_that_is_checked_in() -> None:
    """Commands, options, plan words, keys of a configuration, public names: tests/surface.txt."""
    wanted = surface.FILE.read_text(encoding="utf-8").splitlines()
    found = surface.text().splitlines()
    more = [f"+ {line.strip()}" for line in found if line not in wanted]
    less = [f"- {line.strip()}" for line in wanted if line not in found]
    remedy = "if this is meant, run: python -m tests.surface"
    assert found == wanted, "\n".join(["the surface changed", *less, *more, remedy])


def test_the_options_of_an_engine_are_arguments() -> None:
    """`parallelize` takes each by its name and with its default; kernels are of its device."""
    taken = signature(sw.parallelize).parameters
    options = {f.name: f.default for f in fields(EngineOptions) if f.name != "kernels"}
    assert options == {name: p.default for name, p in taken.items() if p.kind == p.KEYWORD_ONLY}


def test_dir_gives_the_public_names() -> None:
    """`from shardwise import *` and `dir` give the same names, and the version."""
    assert sorted(dir(sw)) == sorted([*sw.__all__, "__version__"])


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
