"""The rules of the house, each a function from a source file to its complaints.

A complaint reads `path:line what`, so that an editor can follow it. `test_house` runs every rule
on every file, and on a small bad file that must be complained of.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: Layers from the bottom up; a file imports from its own layer and from those below it.
LAYERS = (
    *("core", "prediction", "comm", "kernels", "flat", "agreement", "techniques", "engine"),
    *("derive", "checkpoint", "models", "callbacks"),
    *("verify", "train", "hf", "face", "cli", "benchmarks"),
)
#: Files in the folder of a technique that hold values, as core does; and those that apply it to a
#: model, as engine does.
VALUES = (
    *("word", "table_check"),
    *("positions", "stage_io", "layer_plan"),
)
APPLIED = (
    *("apply", "plans", "recorded", "source", "first_step", "placement", "auto"),
    *("disk_optimizer", "partition", "passes", "stage_module", "staged_model"),
    *("weight_stashing", "stage_work", "runtime", "probe"),
)
#: The most files of the package, outside a technique's folder, that import from it. A bound falls
#: with every file that need not know the technique any more; it never rises.
FOREIGN = {
    "data": 23,
    "tensor": 11,
    "expert": 21,
    "pipeline": 12,
    "recompute": 8,
    "layers": 6,
    "offload": 4,
    "tile": 4,
    "context": 4,
    "replicas": 2,
}
#: Folders that import engine/ and are imported by it.
BESIDE_ENGINE = ("observe", "wrap")
#: What a parallel run is compared with.
ORACLES = tuple(
    f"shardwise.verify.oracles.{name}" for name in ("oracle", "async_oracle", "mixture_oracle")
)
FILE_LINES, FUNCTION_LINES, NESTING, SHORT_LINES = 450, 60, 3, 6
#: The files of a folder, `__init__.py` among them.
FOLDER_FILES = 20
POSITIONAL, KEYWORD_ONLY = 7, 16  # parameters of a function
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, and its text."""

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def layer(self) -> str:
        """The layer of a package's file: its folder, or where it stands above the folders."""
        return layer(self.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    def say(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)} {what}"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def named(self) -> list[tuple[ast.AST, str]]:
        """The dotted names that are imported, and those that are read from modules."""
        attributes = [n for n in self.nodes if isinstance(n, ast.Attribute)]
        return [*imports(self), *((n, ast.unparse(n)) for n in attributes)]

    def functions(self) -> list[Function]:
        return [n for n in self.nodes if isinstance(n, Function)]


Rule = Callable[[Source], list[str]]


def layer(module: str) -> str:
    """The layer of a module of the package, by its dotted name."""
    if within(module, "benchmarks"):
        return "benchmarks"
    if module == "shardwise.__main__":
        return "cli"
    _, part, *inner = [*module.split("."), "face"]
    if part == "techniques":
        return next((found for name in inner[1:] if (found := layer_of_technique(name))), part)
    part = "engine" if part in BESIDE_ENGINE else part
    return part if part in LAYERS else "face"


def layer_of_technique(file: str) -> str:
    """The layer of a file in the folder of a technique, or none of its own: most run on a rank."""
    if file in VALUES:
        return "core"
    return "engine" if file in APPLIED else ""


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every dotted name that is imported anywhere in the file, with its statement."""
    package = source.path.removesuffix("/__init__.py").split("/")
    package = package if source.path.endswith("__init__.py") else package[:-1]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def refused(source: Source, wrong: Callable[[str], bool], why: str) -> list[str]:
    """The complaints of names that are `wrong` in a file."""
    return [source.say(node, f"uses {name}{why}") for node, name in source.named if wrong(name)]


# --- size ------------------------------------------------------------------------------------


def short_file(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{source.path} has {lines} lines ({FILE_LINES})"] if lines > FILE_LINES else []


def short_functions(source: Source) -> list[str]:
    return [
        source.say(f, f"{f.name} has {length(f)} lines ({FUNCTION_LINES})")
        for f in source.functions()
        if length(f) > FUNCTION_LINES
    ]


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def few_parameters(source: Source) -> list[str]:
    found = []
    for f in source.functions():
        names = [a.arg for a in [*f.args.posonlyargs, *f.args.args]]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        options = len(f.args.kwonlyargs)
        if count > POSITIONAL:
            found.append(source.say(f, f"{f.name} has {count} parameters ({POSITIONAL})"))
        if options > KEYWORD_ONLY:
            found.append(source.say(f, f"{f.name} has {options} options ({KEYWORD_ONLY})"))
    return found


_NESTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def shallow_functions(source: Source) -> list[str]:
    return [
        source.say(f, f"{f.name} nests {depth} deep ({NESTING})")
        for f in source.functions()
        if (depth := max(_depth(statement) for statement in f.body)) > NESTING
    ]


def _depth(node: ast.AST) -> int:
    """How many blocks deep a statement goes; `elif` is no deeper than its `if`."""
    if isinstance(node, (*_NESTS, ast.ExceptHandler, ast.match_case)):
        inner = max((_inner(node, child) for child in ast.iter_child_nodes(node)), default=0)
        return inner + isinstance(node, _NESTS)
    return 0


def _inner(node: ast.AST, child: ast.AST) -> int:
    is_elif = (
        isinstance(node, ast.If)
        and isinstance(child, ast.If)
        and child in node.orelse
        and child.col_offset == node.col_offset
    )
    return _depth(child) - is_elif


# --- state and shape -------------------------------------------------------------------------


def no_module_state(source: Source) -> list[str]:
    """An empty container at the top of a module is there to be filled: state of the module."""
    empty = ("[]", "{}", "set()", "dict()", "list()", "deque()", "OrderedDict()")
    found = []
    for node in source.tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        text = ast.unparse(value) if value is not None else ""
        if text in empty or text.partition("(")[0] in ("defaultdict", "WeakKeyDictionary"):
            found.append(source.say(node, f"{text} is state of the module"))
    return found


def abstract_or_final(source: Source) -> list[str]:
    """A class of the package is subclassed only if it is abstract; errors may refine errors."""
    known = classes()
    names = {a: m for node, m in imports(source) for a in _bound(node, m)}
    found = []
    for node in [n for n in source.nodes if isinstance(n, ast.ClassDef)]:
        local = {f"{source.path}:{base}": base for base in map(ast.unparse, node.bases)}
        for key, base in local.items():
            parent = _class_in(source).get(base) or known.get(names.get(base, key))
            if parent is not None and not _abstract(parent) and not _is_error(parent):
                found.append(source.say(node, f"{node.name} is a subclass of {base}, a concrete"))
    return found


def _bound(node: ast.stmt, module: str) -> list[str]:
    """The names under which an import statement binds the dotted name `module`."""
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    last = module.rpartition(".")[2]
    return [a.asname or a.name for a in node.names if a.name in (last, module)]


def _class_in(source: Source) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in source.tree.body if isinstance(n, ast.ClassDef)}


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class at the top of a module of the package, by its dotted name."""
    found: dict[str, ast.ClassDef] = {}
    for source in package_files():
        module = source.path.removesuffix(".py").replace("/", ".")
        found |= {f"{module}.{name}": node for name, node in _class_in(source).items()}
    return found


def _abstract(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    return bool({"ABC", "Protocol"} & set(bases)) or "abstractmethod" in ast.unparse(node)


def _is_error(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)


def plain_names(source: Source) -> list[str]:
    found = [n for n in source.nodes if isinstance(n, ast.ClassDef)]
    vague = ("Manager", "Handler", "Strategy", "Context")
    return [source.say(n, f"{n.name} says too little") for n in found if n.name.endswith(vague)]


# --- layers ----------------------------------------------------------------------------------


def downward_imports(source: Source) -> list[str]:
    def above(name: str) -> bool:
        ours = within(name, "shardwise", "benchmarks")
        return ours and LAYERS.index(layer(name)) > LAYERS.index(source.layer)

    return refused(source, above, f", of a layer above {source.layer}")


def techniques_apart(source: Source) -> list[str]:
    """What runs on a rank never imports another technique; what applies one may."""
    own, all_of_them = ".".join(source.path.split("/")[:3]), "shardwise.techniques"
    if source.layer not in ("techniques", "core") or not within(own, all_of_them):
        return []
    return refused(
        source, lambda name: within(name, all_of_them) and not within(name, own), ", another's"
    )


def foreign_files() -> dict[str, list[str]]:
    """The files of the package that import from the folder of each technique, outside of it."""
    found: dict[str, set[str]] = {name: set() for name in FOREIGN}
    for source in _files("shardwise"):
        named = [name.split(".") for _, name in imports(source)]
        for technique in {name[2] for name in named if name[:2] == ["shardwise", "techniques"]}:
            if not source.path.startswith(f"shardwise/techniques/{technique}/"):
                found[technique].add(source.path)
    return {name: sorted(files) for name, files in found.items()}


def one_door(source: Source) -> list[str]:
    """Only comm/ and benchmarks/ see torch.distributed; checkpoint/ its own part of it."""
    if source.layer in ("comm", "benchmarks"):
        return []
    allowed = "torch.distributed.checkpoint" if source.layer == "checkpoint" else "none"
    return refused(
        source, lambda name: within(name, "torch.distributed") and not within(name, allowed), ""
    )


#: The files of comm/ that carry out what is asked of a transport, and count it.
COUNTING = [
    f"shardwise/comm/{name}.py"
    for name in (
        *("ledger", "volume", "transport", "gloo/gloo", "nccl", "gloo/shared"),
        *("gloo/mailbox", "threads", "fake", "torch_links"),
    )
]


def counted_apart(source: Source) -> list[str]:
    """What is counted and what is predicted share no arithmetic.

    No file of comm/ imports a price or a prediction; the transports and their ledger do not import
    the table of moves or move.py either.  That prediction/ imports no comm/ is a rule of layers.
    """
    if source.layer != "comm":
        return []
    priced = ["shardwise.core.layouts.layout.price", "shardwise.prediction"]
    asking = ["shardwise.core.layouts.layout", "shardwise.comm.move"]
    wrong = priced + asking * (source.path in COUNTING)
    return refused(source, lambda name: within(name, *wrong), ", with which it is compared")


def oracles_apart(source: Source) -> list[str]:
    """The oracles of verify/ import torch and one another, and nothing of what they judge."""
    module = source.path.removesuffix(".py").replace("/", ".")
    if module not in ORACLES:
        return []
    allowed = ("torch", *ORACLES, *sorted(sys.stdlib_module_names))
    return [
        source.say(node, f"imports {name}, while an oracle stands alone")
        for node, name in imports(source)
        if not within(name, *allowed) or within(name, "torch.distributed")
    ]


def no_torch_below(source: Source) -> list[str]:
    below = source.layer in ("core", "prediction")
    return refused(source, lambda name: below and within(name, "torch"), "")


def no_environment(source: Source) -> list[str]:
    """Environment variables are read in comm/, at start-up, and nowhere else."""
    read = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    return refused(source, lambda name: name in read and source.layer != "comm", "")


#: Functions of torch whose dtype and device are the program's defaults unless they are named.
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_strided"),
)
#: A module's own weights follow the defaults, like those of every module.
_WEIGHTS = ("nn.Parameter", "nn.Buffer", "self.register_buffer")


def names_dtype_and_device(source: Source) -> list[str]:
    """New tensors never follow the program's default dtype and device."""
    if source.layer not in ("comm", "techniques", "engine", "checkpoint"):
        return []
    calls = [n for n in source.nodes if isinstance(n, ast.Call)]
    weights = [n for call in calls if ast.unparse(call.func) in _WEIGHTS for n in ast.walk(call)]
    return [
        source.say(call, f"{called} names no {', no '.join(missing)}")
        for call in calls
        if (called := ast.unparse(call.func)).removeprefix("torch.") in _FACTORIES
        and called.startswith("torch.")
        and call not in weights
        and (missing := sorted({"dtype", "device"} - {k.arg for k in call.keywords}))
    ]


# --- words -----------------------------------------------------------------------------------


def public_docstrings(source: Source) -> list[str]:
    return [
        source.say(f, f"{f.name} is public, {length(f)} lines long, without a docstring")
        for f in source.functions()
        if not f.name.startswith("_") and length(f) > SHORT_LINES and not ast.get_docstring(f)
    ]


def says_its_fact(source: Source) -> list[str]:
    """Each test says the fact that it proves."""
    return [
        source.say(f, f"{f.name} does not say the fact it proves")
        for f in source.functions()
        if f.name.startswith("test_") and not ast.get_docstring(f)
    ]


SIZE: list[Rule] = [short_file, short_functions, few_parameters, shallow_functions]
PACKAGE: list[Rule] = [
    *SIZE,
    *(no_module_state, abstract_or_final, plain_names),
    *(downward_imports, techniques_apart, one_door, oracles_apart),
    *(no_torch_below, no_environment, names_dtype_and_device),
    counted_apart,
    public_docstrings,
]
TESTS: list[Rule] = [*SIZE, plain_names, says_its_fact]


@cache
def package_files() -> list[Source]:
    """The files of the package, and the benchmarks beside it, which keep the same rules."""
    return [*_files("shardwise"), *_files("benchmarks")]


def files_of_tests() -> list[Source]:
    return _files("tests")


def _files(folder: str) -> list[Source]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths]
