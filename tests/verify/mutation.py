"""Mutations of the package: edits of functions, as mutations.txt has them, made while it runs."""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from types import CodeType
from typing import Any

import pytest

FILE = Path(__file__).with_name("mutations.txt")
NAME = re.compile(r"(.+) \[(.+?)(?: of (\w+))?\](?: (\w+))?")


@dataclass(frozen=True)
class Mutation:
    """A sabotage, and `refused_by`, what of a proof refuses it. `edits` has the lines of each
    function, by its file and name.
    """

    name: str
    plan: str
    model: str
    refused_by: str
    edits: dict[str, list[str]]

    @property
    def id(self) -> str:
        return f"{self.name} [{self.plan}]"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Change the code of its functions, which every module that imports them has."""
        for target, lines in self.edits.items():
            function = function_at(target)
            patch.setattr(function, "__code__", edited(function, lines))


def catalogue() -> list[Mutation]:
    """The mutations of the file, in its order."""
    found = list[Mutation]()
    for line in FILE.read_text().splitlines():
        text = line.strip()
        if text[:2] in ("- ", "+ ", "= "):
            found[-1].edits[[*found[-1].edits][-1]].append(text)
        elif line.startswith(" "):
            found[-1].edits[text] = []
        elif match := NAME.fullmatch(line.partition("#")[0]):
            name, plan, model, part = match.groups()
            found.append(Mutation(name, plan, model or "layers", part or "parity", {}))
    return found


def function_at(target: str) -> Callable[..., Any]:
    """The function of the package at `folder/file.py:Class.name`, without its decorators."""
    path, _, name = target.partition(":")
    found: Any = import_module(f"shardwise.{path.removesuffix('.py').replace('/', '.')}")
    for part in name.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found)


def edited(function: Callable[..., Any], edits: Sequence[str]) -> CodeType:
    """The code of a function with the lines of a mutation. Raises LookupError if a line that is
    left out is not there, or twice.
    """
    source = dedent(inspect.getsource(function)).splitlines()
    (whole,) = ast.parse("\n".join(source)).body
    assert isinstance(whole, ast.FunctionDef)
    at, added = whole.body[0].lineno - 1, defaultdict[int, list[str]](list)
    left_out, results = set(range(whole.lineno - 1)), list[str]()
    for sign, text in ((line[0], line[2:]) for line in edits):
        if sign == "-":
            places = [n for n, line in enumerate(source) if line.strip().startswith(text)]
            if len(places) != 1:
                raise LookupError(f"{len(places)} lines of {function.__qualname__} are {text!r}")
            (at,) = places
            left_out.add(at)
        elif sign == "+":
            indented = len(source[at]) - len(source[at].lstrip())
            added[at].append(" " * indented + text)
        else:
            results.append(text)
    lines = [
        each
        for n, line in enumerate(source)
        for each in [*added[n], *([] if n in left_out else [line])]
    ]
    free = ", ".join(function.__code__.co_freevars)
    tree = ast.parse(f"def free({free}):\n" + indent("\n".join(lines), "    "))
    for result in results:
        tree = Results(result).visit(tree)
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec")
    for name in ("free", function.__name__):
        code = next(x for x in code.co_consts if isinstance(x, CodeType) and x.co_name == name)
    return code


class Results(ast.NodeTransformer):
    """Replaces what a function returns; not what functions in it do."""

    def __init__(self, result: str) -> None:
        self.result, self.depth = result, 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.depth == 2:
            return node
        self.depth += 1
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        changed = ast.parse(f"(lambda found: {self.result})(0)", mode="eval").body
        assert isinstance(changed, ast.Call) and node.value is not None
        changed.args = [node.value]
        return ast.Return(changed)
