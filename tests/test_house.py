"""The house test: every file keeps the rules of the house, and every rule can fail."""

from collections import Counter

import pytest

from tests import house
from tests.house import PACKAGE, TESTS, Rule, Source

#: Lines and files of the package and of the tests. A change may lower them, never raise them.
SIZES = {"shardwise": (56775, 309), "tests": (31288, 119)}

IN_PACKAGE = house.package_files()
IN_TESTS = house.files_of_tests()


def named(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", PACKAGE, ids=named)
def test_package(rule: Rule):
    """Every file of the package keeps the rule."""
    assert [said for source in IN_PACKAGE for said in rule(source)] == []


@pytest.mark.parametrize("rule", TESTS, ids=named)
def test_tests(rule: Rule):
    """Every test file is as short as the files it tests, and every test says its fact."""
    assert [said for source in IN_TESTS for said in rule(source)] == []


def test_a_class_has_a_name_of_its_own():
    """Of two classes of a name, a reader must guess which one is meant."""
    known = (name for name in house.classes() if name.startswith("shardwise."))
    names = Counter(name.rpartition(".")[2] for name in known)
    assert [name for name, n in names.items() if n > 1] == []


def test_a_file_has_a_name_of_its_own():
    """Of two files of a name as well; each technique has its word, its prices and its apply."""
    paths = [source.path for source in IN_PACKAGE if source.path.startswith("shardwise/")]
    names = Counter(path.rpartition("/")[2] for path in paths)
    of_techniques = {"__init__.py", "word.py", "price.py", "apply.py"}
    assert [name for name, n in names.items() if n > 1 and name not in of_techniques] == []


def test_techniques_are_known_to_few_files():
    """As many files import from a technique's folder as the bound says: it falls with them."""
    assert {name: len(files) for name, files in house.foreign_files().items()} == house.FOREIGN


def test_folders_are_small():
    """A folder of the package has as many files as a reader finds his way in."""
    files = Counter(source.path.rpartition("/")[0] for source in IN_PACKAGE)
    assert {folder: n for folder, n in files.items() if n > house.FOLDER_FILES} == {}


def test_nothing_grows():
    """The package and its tests have as many lines and files as the last change left them."""
    found: dict[str, tuple[int, int]] = dict.fromkeys(SIZES, (0, 0))
    for source in (*IN_PACKAGE, *IN_TESTS):
        if (folder := source.path.partition("/")[0]) in SIZES:
            lines, files = found[folder]
            found[folder] = lines + source.text.count("\n"), files + 1
    assert found == SIZES


def body(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


NESTED = """
def f(x):
    for a in x:
        if a:
            with a:
                {}
"""

#: rule -> (path, text) pairs that it must complain of once; it lets the whole package pass.
BAD: dict[Rule, list[tuple[str, str]]] = {
    house.short_file: [("shardwise/core/x.py", "x = 1\n" * 451)],
    house.short_functions: [("shardwise/core/x.py", body(61))],
    house.few_parameters: [
        ("shardwise/core/x.py", "def f(a, b, c, d, e, f, g, h): ..."),
        ("shardwise/core/x.py", "class A:\n    def f(self, a, b, c, d, /, e, f, g, h, *, i): ..."),
        ("shardwise/core/x.py", f"def f(*, {', '.join(f'x{i}' for i in range(17))}): ..."),
    ],
    house.shallow_functions: [
        ("shardwise/core/x.py", NESTED.format("while a: a = 0")),
        ("shardwise/core/x.py", NESTED.format("if a: a = 0\n                else: a = 1")),
    ],
    house.no_module_state: [
        ("shardwise/core/x.py", "seen = []"),
        ("shardwise/core/x.py", "seen: dict[str, int] = {}"),
        ("shardwise/core/x.py", "seen = defaultdict(list)"),
    ],
    house.abstract_or_final: [
        ("shardwise/core/x.py", "class A: ...\nclass B(A): ..."),
        ("shardwise/train/x.py", "from shardwise.core.mesh import Mesh\nclass B(Mesh): ..."),
        ("shardwise/train/x.py", "from shardwise.core.mesh import Mesh as M\nclass B(M): ..."),
        ("shardwise/core/x.py", "from .mesh import Mesh\nclass B(Mesh): ..."),
    ],
    house.plain_names: [("shardwise/core/x.py", "class PlanManager: ...")],
    house.downward_imports: [
        ("shardwise/core/x.py", "from shardwise.comm.world import World"),
        ("shardwise/prediction/x.py", "import shardwise.comm"),
        ("shardwise/techniques/data/x.py", "def f():\n    from ...engine import step"),
        ("shardwise/engine/__init__.py", "from ..train import loop"),
        ("shardwise/train/loop.py", "from shardwise import FSDP"),
        ("shardwise/train/loop.py", "from shardwise.cli import main as cli"),
        ("shardwise/cli/main.py", "import benchmarks.data"),
    ],
    house.techniques_apart: [
        ("shardwise/techniques/data/x.py", "from shardwise.techniques.tensor.linear import Stream"),
        ("shardwise/techniques/data/x.py", "from ..pipeline import runtime"),
    ],
    house.one_door: [
        ("shardwise/train/x.py", "import torch.distributed as dist"),
        ("shardwise/train/x.py", "from torch import distributed"),
        ("shardwise/train/x.py", "from torch.distributed.checkpoint import save"),
        ("shardwise/train/x.py", "import torch\nn = torch.distributed"),
        ("shardwise/checkpoint/x.py", "from torch.distributed import barrier"),
    ],
    house.counted_apart: [
        ("shardwise/comm/move.py", "from shardwise.core.layouts.layout import price"),
        ("shardwise/comm/x.py", "from shardwise.prediction.traffic import step_bytes"),
        ("shardwise/comm/gloo/gloo.py", "from shardwise.core.layouts.layout import what"),
        ("shardwise/comm/ledger.py", "from shardwise.comm.move import start"),
    ],
    house.oracles_apart: [
        ("shardwise/verify/oracles/mixture_oracle.py", "from shardwise.models import gpt"),
        ("shardwise/verify/oracles/oracle.py", "from .parity import SEED"),
        ("shardwise/verify/oracles/async_oracle.py", "import torch.distributed as dist"),
        ("shardwise/verify/oracles/async_oracle.py", "def f():\n    import numpy"),
    ],
    house.no_torch_below: [
        ("shardwise/core/x.py", "import torch"),
        ("shardwise/prediction/x.py", "def f():\n    from torch.nn import Module"),
    ],
    house.no_environment: [
        ("shardwise/train/x.py", "import os\nx = os.environ"),
        ("benchmarks/x.py", "import os\nx = os.getenv('X')"),
        ("shardwise/core/x.py", "from os import environ"),
    ],
    house.names_dtype_and_device: [
        ("shardwise/techniques/x.py", "torch.tensor([1.0], device=here)"),
        ("shardwise/comm/x.py", "torch.zeros(1, dtype=torch.int64)"),
        ("shardwise/engine/x.py", "x = torch.arange(3)"),
    ],
    house.public_docstrings: [("shardwise/core/x.py", body(7))],
    house.says_its_fact: [("tests/test_x.py", "def test_x():\n    assert True")],
}
CASES = [(rule, *case) for rule, cases in BAD.items() for case in cases]


@pytest.mark.parametrize(
    ("rule", "path", "text"), CASES, ids=[f"{named(r)}-{t[:30]!r}" for r, _, t in CASES]
)
def test_rule_can_fail(rule: Rule, path: str, text: str):
    """A file that breaks the rule is complained of, once, with its path."""
    complaints = rule(Source(path, text))
    assert len(complaints) == 1
    assert complaints[0].startswith(path)


def test_every_rule_is_tested():
    """No rule stands in the list without a file that shows it can fail."""
    assert {*PACKAGE, *TESTS} == set(BAD)
