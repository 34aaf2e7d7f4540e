"""What may differ between ranks on purpose; each kind is warned about once.

    passes     backward passes of a loop's step, whose gradients are summed at once
    writes     of the program to parameters, optimizer states and gradients, between steps
    arguments  numbers and words that a loop's forward takes beside tensors, as a temperature
    graph      the operations of a loop's loss: that of the backward pass that runs, whose call is
               on the stack of this thread, or of the one that waits for it
    hooks      of the program on modules and parameters
    numbers    of modules (epsilon, the rate of a dropout), words ("mean"), and functions
    reads      what functions, as each forward, read: numbers and words of their modules and
               classes, variables of the environment, functions, and what those of the program read

Graphs, hooks, numbers and reads are compared every so many steps, the others in each.
"""

import dis
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.agreement.checksum import NUMBERS, Options, bits_sum, has_bits, text_hash
from shardwise.comm.start.rendezvous import variables_named
from shardwise.core.tools.hook import program_hooks
from shardwise.core.tools.tree import leaves
from shardwise.flat.flat_parameter import Flat

#: Names of attributes that may differ between ranks, or that others compare; and those of settings.
_of_a_rank = re.compile("rank|dynamo|training|procid|localid|device|gpu", re.IGNORECASE).search
_MOST_ITEMS, _MOST_ELEMENTS = 64, 2**16  # of a list among them, of a tensor
_SETTINGS: Final = {"config", "cfg", "args", "hparams", "params", "options"}
KINDS: Final = {
    "passes": "If the loss of each pass is divided by their number, this is no mistake.",
    "writes": "If each rank writes to what it alone holds, this is no mistake.",
    "arguments": "If the batch decides them, this is no mistake.",
    "graph": "If the batch decides which operations a rank computes, this is no mistake.",
    "hooks": "A hook that only reads may stay.",
    "numbers": "A number that a module only records may stay.",
    "reads": "What is read only for a log may stay.",
}


class Doubts:
    """What this rank has of each kind since the step before."""

    def __init__(self, flats: Sequence[Flat], modules: Mapping[str, nn.Module]) -> None:
        self.flats, self.modules = flats, modules
        self.functions: dict[str, Any] = {}  # of the program, that an engine calls
        self.lengths = {name: _lengths(module) for name, module in modules.items()}
        self.params = [pair for f in flats for pair in zip(f.names, f.params, strict=True)]
        self.passes = self.gradient_writes = 0
        self.state_writes = False
        self.graph: Options = {}
        self.arguments: list[float | str] = []  # of the forward passes, beside tensors
        self.version: int | None = None  # of all parameters, in the step before
        self.warned = set[str]()  # of these kinds, which are compared no more

    def found(self, *, all_kinds: bool) -> dict[str, Options]:
        """By kind, then by module or parameter; the next step begins."""
        found = defaultdict[str, Options](dict)
        if self.passes:
            found["passes"] = {"the backward passes of the step": self.passes}
        now = sum(p._version for _, p in self.params) + sum(f.assignments for f in self.flats)
        if self.version is not None:
            found["writes"] = {
                "changes of parameters since the step before": now - self.version,
                "changes of the optimizer's states since the step before": self.state_writes,
                "changes of gradients before the optimizer's step": self.gradient_writes,
            }
        found["graph"] = self.graph
        found["arguments"] = {"the numbers and words that forward passes take": self.arguments}
        for name, owner in (*self.modules.items(), *self.params) if all_kinds else ():
            place = f"of {name or 'the model'}"
            if hooks := program_hooks(owner):
                found["hooks"][f"hooks {place}"] = hooks
            if isinstance(owner, nn.Module):
                numbers = _values_of(owner, self.lengths[name]).items()
                found["numbers"] |= {f"{key} {place}": x for key, x in numbers}
        if all_kinds:
            found["reads"] = reads(self.functions, self.modules.values())
        self.version, self.gradient_writes, self.graph = now, 0, {}
        self.arguments = []
        return {kind: own for kind, own in found.items() if kind not in self.warned and own}

    def warn(self, kind: str, error: Exception) -> None:
        self.warned.add(kind)
        warnings.warn(f"{error} {KINDS[kind]}", stacklevel=2)


def numbers_in(name: str, x: Any) -> Options:
    """`x` if it is a number, or the numbers in a short list, tuple or dict, unless of nn.Module."""
    if isinstance(x, NUMBERS):
        return {name: x}
    items = x if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, list | tuple) else {}
    short = items if len(items) <= _MOST_ITEMS and not name.startswith("_") else {}
    return {f"{name}[{key!r}]": y for key, y in short.items() if isinstance(y, NUMBERS)}


def floats_of(module: nn.Module) -> Options:
    """The floats of a module that is made: epsilon, the rate of a dropout, those in its lists and
    dicts; and the bits of its tensors that are no buffers.
    """
    found = _values_of(module, _lengths(module)).items()
    own = ((name, x) for name, x in vars(module).items() if has_bits(x) and not _of_a_rank(name))
    tensors = {name: int(bits_sum(x)) for name, x in own if x.numel() <= _MOST_ELEMENTS}
    return {name: x for name, x in found if type(x) is float} | tensors


def _lengths(module: nn.Module) -> dict[str, int]:
    return {name: len(x) for name, x in vars(module).items() if isinstance(x, list | tuple | dict)}


def _values_of(module: nn.Module, lengths: Mapping[str, int]) -> Options:
    """Its numbers, words and functions, but for those of a rank or of dynamo, and the numbers of
    its `config`, or `args`, and of lists and dicts that have these lengths: one that grows is a
    record.
    """
    found = Options()
    for name, x in vars(module).items():
        if name in _SETTINGS and isinstance(getattr(x, "__dict__", None), dict):
            found |= {f"{name}.{key}": y for key, y in vars(x).items() if isinstance(y, NUMBERS)}
        elif not isinstance(x, list | tuple | dict) or len(x) == lengths.get(name):
            found |= _values_in(name, x)
    return {name: x for name, x in found.items() if not _of_a_rank(name)}


# --- the operations of a loss -----------------------------------------------------------------

#: The numbers of operations that no shape decides.
_SAVED_NUMBERS: Final = (
    *("reduction", "ignore_index", "beta", "delta", "alpha", "exponent", "p", "other", "min"),
    *("max", "negative_slope", "is_causal", "eps"),
)


def operations_of_pass() -> Options:
    """The kinds of nodes in the graph that is differentiated; none if no call of it is found.

    Those between a loss and its first node of several inputs are one more, in their order.
    """
    nodes = [x.grad_fn for x in leaves(_differentiated(), Tensor) if x.grad_fn is not None]
    last = [" of ".join(filter(None, map(_kind, _before_branch(node)))) for node in nodes]
    seen = set(nodes)
    while nodes:
        new = {*_inputs(nodes.pop())} - seen
        seen |= new
        nodes += new
    kinds = sorted({_kind(node) for node in seen} - {""})
    found = {f"the operation {kind} in the loss": True for kind in kinds}
    return {"the last operations of the loss": last, **found}


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _before_branch(node: Any) -> Iterable[Any]:
    inputs = [node]
    while len(inputs) == 1:
        yield inputs[0]
        inputs = _inputs(inputs[0])


def _kind(node: Any) -> str:
    """With the numbers that no shape decides: a mean and a sum differ in the first.

    None of a view: whether it is copied depends on the shapes of a rank's rows.
    """
    if any(word in node.name() for word in ("View", "Clone")):
        return ""
    known = list[str]()
    for name in _SAVED_NUMBERS:
        if hasattr(node, f"_raw_saved_{name}"):  # a tensor, which may be unpacked once alone
            continue
        with suppress(AttributeError):
            value = getattr(node, f"_saved_{name}")
            known += [f"{name}={value}"] if isinstance(value, NUMBERS) else []
    return " ".join((node.name(), *known))


def _differentiated() -> Any:
    """The tensors of the call of `backward` that runs. Keeps no frame, which would keep a model."""
    found, frames = None, [sys._getframe(1), *sys._current_frames().values()]
    while frames and found is None:
        frame: FrameType | None = frames.pop(0)
        while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
            frame = frame.f_back
        found = None if frame is None else frame.f_locals["tensors"]
        del frame
    frames.clear()
    return found


# --- functions ----------------------------------------------------------------------------------

_FUNCTIONS: Final = FunctionType, BuiltinFunctionType
_VARIABLE: Final = "the environment's "


def layers_of(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        inner = (getattr(function, name, None) for name in ("__func__", "__wrapped__", "func"))
        function = next((each for each in inner if callable(each)), None)


def identity(function: Any) -> str:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} (code {_code_hash(code):014x})"


@cache
def _code_hash(code: CodeType | None) -> int:
    return text_hash(_code_text(code))


def _code_text(code: Any) -> str:
    if isinstance(code, frozenset):  # whose order differs between processes
        return repr(sorted(map(_code_text, code)))
    if isinstance(code, tuple):
        return repr([*map(_code_text, code)])
    if not isinstance(code, CodeType):
        return repr(code)
    return repr((code.co_code, code.co_names, _code_text(code.co_consts)))


@cache
def _names_in(code: CodeType) -> tuple[list[str], list[str]]:
    """The names that code reads from its module, and paths that begin with any name ("F.gelu");
    words that may name variables of the environment.
    """
    path, paths = "", list[str]()
    for step in dis.get_instructions(code):
        follows = path and step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        begins = step.opname in ("LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF")
        path = f"{path}.{step.argval}" if follows else str(step.argval) if begins else ""
        paths += [path] if follows or step.opname == "LOAD_GLOBAL" else []
    words = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    words = words if {"environ", "getenv"} & {*code.co_names} else []
    for inner in (each for each in code.co_consts if isinstance(each, CodeType)):
        for own, further in zip((paths, words), _names_in(inner), strict=True):
            own += further
    return paths, words


def read_by(function: Any, owner: type | None = None) -> Options:
    """What a function closes over, reads from its module and of what it reads, by name. `owner`:
    the class of which it is a method.
    """
    if isinstance(function, partial):
        bound = {f"argument {n}": x for n, x in enumerate(function.args)}
        return {**read_by(function.func), **bound, **function.keywords}
    if not isinstance(function, FunctionType):
        return _with_modules({**getattr(function, "__dict__", {})})
    code = function.__code__
    paths, words = _names_in(code)
    arguments = code.co_varnames[: code.co_argcount]
    read = dict(zip(arguments[::-1], (function.__defaults__ or ())[::-1], strict=False))
    read |= function.__kwdefaults__ or {}
    with suppress(ValueError):  # a name that has no value yet
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        read |= {name: cell.cell_contents for name, cell in cells}
    read |= dict.fromkeys(arguments[:1] if owner else (), owner)
    for path in paths:
        of, _, name = path.rpartition(".")
        x = read.get(of)
        tables = x.__mro__[::-1] if isinstance(x, type) else [x]
        every = [getattr(x, "__dict__", {}) for x in tables] if of else [function.__globals__]
        read |= ((path, table[name]) for table in every if name in table)
    environment = {_VARIABLE + name: x for name, x in variables_named(words).items()}
    return _with_modules(read) | environment


def _with_modules(read: Options) -> Options:
    """And the attributes of losses of torch's kind."""
    modules = {name: x for name, x in read.items() if isinstance(x, nn.modules.loss._Loss)}
    held = {n: {**vars(m), **m._buffers} for n, m in modules.items()}
    return read | {f"{n}.{key}": x for n, own in held.items() for key, x in own.items()}


def values_read(function: Any, owner: type | None = None, seen: Iterable[int] = ()) -> Options:
    """The numbers, short words ("sum"), functions and variables of the environment that a function
    reads, but for those of a rank; and what functions of the program read that it calls.
    """
    found, done = Options(), {*seen, id(function)}  # objects that are called may have no hash
    layers = (layer for layer in layers_of(function) if _package(layer) != "shardwise")
    read = chain.from_iterable(read_by(layer, owner).items() for layer in layers)
    for name, x in ((name, x) for name, x in read if not _of_a_rank(name)):
        found |= _values_in(name, x, owner, done)
    return found


def _values_in(name: str, x: Any, owner: type | None = None, seen: Iterable[int] = ()) -> Options:
    if isinstance(x, str):
        return {name: x} if x.isalpha() or name.startswith(_VARIABLE) else {}
    if not isinstance(x, _FUNCTIONS):
        return numbers_in(name, x)
    called = {} if id(x) in seen or installed(x) else values_read(x, owner, seen)
    return {name: identity(x)} | {f"{key} in {name}": y for key, y in called.items()}


def installed(function: Any) -> bool:
    path = getattr(getattr(function, "__code__", None), "co_filename", "-packages")
    return "-packages" in path or _package(function) in ("shardwise", *sys.stdlib_module_names)


def _package(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}".partition(".")[0]


def reads(functions: Mapping[str, Any], modules: Iterable[nn.Module] = ()) -> Options:
    """What functions of the program read, and the forward of each class of modules."""
    every = {name: (function, None) for name, function in functions.items() if callable(function)}
    every |= {f"the forward of {type(m).__qualname__}": (m.forward, type(m)) for m in modules}
    return {
        f"{name} in {place}": x
        for place, (function, owner) in every.items()
        for name, x in values_read(function, owner).items()
    }
