"""Faults that are drawn mechanically: one node of a function's syntax tree replaced.

    constant        n + 1 for n, True for False         negation    `if not x` for `if x`
    comparison      `<=` for `<`, `!=` for `==`         call        a call as a statement left out
    arithmetic      `-` for `+`, `//` for `*`           arguments   the first two swapped
    logic           `or` for `and`                      result      `return None`

A fault has a name of one line, which stays when the lines around it move:

    engine/batch.py:filled | comparison | if count < least:

The second of several on equal lines of one function is `comparison 2`. What is drawn, and which
tests notice it, stands in tests/mutants.txt. Texts of errors and conditions of assertions are left
out, and the first two arguments of functions that do not tell them apart.
"""

import ast
import importlib.machinery
import os
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "shardwise"
#: The environment variable that names the fault of a process.
VARIABLE = "SHARDWISE_TESTS_MUTATION"
SEED = 49
#: How many are drawn of each folder.
DRAWN = {
    "engine": 18,
    "techniques/data": 12,
    "techniques/tensor": 6,
    "techniques/pipeline": 8,
    "techniques/expert": 5,
    "techniques/context": 3,
    "techniques/offload": 5,
    "techniques/recompute": 3,
    "core": 9,
    "comm": 9,
    "checkpoint": 7,
    "verify": 4,
    "prediction": 5,
    "train": 5,
    "cli": 1,
}
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = dict(
    [
        *((ast.Lt, ast.LtE), (ast.LtE, ast.Lt), (ast.Gt, ast.GtE), (ast.GtE, ast.Gt)),
        *((ast.Eq, ast.NotEq), (ast.NotEq, ast.Eq), (ast.In, ast.NotIn), (ast.NotIn, ast.In)),
        *((ast.Is, ast.IsNot), (ast.IsNot, ast.Is)),
    ]
)
COMPUTED: dict[type[ast.operator], type[ast.operator]] = dict(
    [
        *((ast.Add, ast.Sub), (ast.Sub, ast.Add), (ast.Mult, ast.FloorDiv)),
        *((ast.FloorDiv, ast.Mult), (ast.Div, ast.Mult), (ast.Mod, ast.FloorDiv)),
    ]
)
SYMMETRIC = {"min", "max", "gcd", "lcm", "equal", "allclose", "logaddexp", "maximum", "minimum"}
TYPES = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Fields in which nothing is replaced.
UNCHANGED: dict[type[ast.AST], tuple[str, ...]] = {
    ast.FunctionDef: ("decorator_list", "returns", "args"),
    ast.AsyncFunctionDef: ("decorator_list", "returns", "args"),
    ast.Lambda: ("args",),
    ast.AnnAssign: ("annotation",),
}


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each rule that holds for a node, and what it puts in the node's place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield "comparison", ast.Compare(node.left, [COMPARED[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in COMPUTED and not _text(node):
            yield "arithmetic", ast.BinOp(node.left, COMPUTED[type(op)](), node.right)
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.BoolOp(op=op, values=values):
            yield "logic", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.If() | ast.While() | ast.IfExp():
            negated = copy(node)
            negated.test = ast.UnaryOp(ast.Not(), node.test)
            yield "negation", negated
        case ast.Expr(value=ast.Call()):
            yield "call", ast.Pass()
        case ast.Call(args=[one, other, *more]) if _apart(node):
            yield "arguments", ast.Call(node.func, [other, one, *more], node.keywords)
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "result", ast.Return(ast.Constant(None))


def _text(node: ast.BinOp) -> bool:
    """Whether an operator joins or formats texts."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _apart(call: ast.Call) -> bool:
    """Whether the first two arguments are others when they are swapped."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    one, other = call.args[:2]
    starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
    return not (starred or name in SYMMETRIC | TYPES or ast.dump(one) == ast.dump(other))


@dataclass(frozen=True)
class Site:
    """A node of a function, by its place in its parent, and what stands there instead."""

    name: str
    parent: ast.AST
    field: str
    index: int | None
    instead: ast.AST

    def put(self) -> None:
        if self.index is None:
            setattr(self.parent, self.field, self.instead)
        else:
            getattr(self.parent, self.field)[self.index] = self.instead


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods of a module, by their qualified names; not those within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node, prefix)


def _nodes(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """All nodes below one that can be replaced: parent, field, index and node."""
    for field, value in ast.iter_fields(node):
        if field in UNCHANGED.get(type(node), ()):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _left_out(child):
                yield node, field, index, child
                yield from _nodes(child)


def _left_out(node: ast.AST) -> bool:
    strict = isinstance(node, ast.keyword) and node.arg == "strict"
    return strict or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def sites(path: str, tree: ast.Module, lines: list[str]) -> Iterator[Site]:
    """Every fault of a file of the package."""
    for function, body in functions(tree):
        seen = Counter[tuple[str, str]]()
        for parent, field, index, node in _nodes(body):
            for rule, instead in replacements(node):
                text = lines[getattr(node, "lineno", 1) - 1].strip()
                seen[rule, text] += 1
                nth = "" if seen[rule, text] == 1 else f" {seen[rule, text]}"
                name = f"{path}:{function} | {rule}{nth} | {text}"
                yield Site(name, parent, field, index, ast.copy_location(instead, node))


def read(file: Path) -> tuple[str, ast.Module, list[str]]:
    """A file's path in the package, its tree and its lines."""
    text = file.read_text()
    return str(file.relative_to(PACKAGE)), ast.parse(text), text.splitlines()


def with_fault(file: Path, name: str) -> ast.Module:
    """The tree of a file with the fault of this name."""
    path, tree, lines = read(file)
    site = next((site for site in sites(path, tree, lines) if site.name == name), None)
    if site is None:
        raise LookupError(f"no line of the package is that of {name}: draw again")
    site.put()
    return ast.fix_missing_locations(tree)


# --- the draw ---------------------------------------------------------------------------------


def draw(kept: Collection[str] = ()) -> list[str]:
    """The names of the drawn faults, those kept first. A function is drawn, then one of the rules
    that hold in it, then a place.
    """
    drawn = list[str]()
    for folder, count in DRAWN.items():
        rng = random.Random(f"{SEED} {folder}")
        found = [name for name in kept if name.startswith(f"{folder}/") and stands(name)]
        candidates = _by_function(folder)
        while len(found) < count and candidates:
            by_rule = candidates.pop(rng.randrange(len(candidates)))
            name = rng.choice(by_rule[rng.choice(sorted(by_rule))])
            found += [name] if name not in found else []
        drawn += found
    return drawn


def is_drawn(name: str) -> bool:
    """Whether it names a line, as no sabotage of the catalogue does, whose plan may have a |."""
    return ".py:" in name.partition(" | ")[0]


def stands(name: str) -> bool:
    """Whether the line of a fault is in the package."""
    file = PACKAGE / name.partition(":")[0]
    return file.exists() and any(site.name == name for site in sites(*read(file)))


def _by_function(folder: str) -> list[dict[str, list[str]]]:
    """The names of the faults of each function of a folder, by their rules."""
    found = defaultdict[str, defaultdict[str, list[str]]](lambda: defaultdict(list))
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        for site in sites(*read(file)):
            function, rule, _ = site.name.split(" | ", 2)
            found[function][rule.split()[0]].append(site.name)
    return [dict(rules) for rules in found.values()]


# --- the fault of this process, and of those that ranks are forked from --------------------------


def put_in(name: str) -> None:
    """A fault of the catalogue; or a drawn one, with which its file is compiled when imported."""
    patch = pytest.MonkeyPatch()
    if not is_drawn(name):
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
