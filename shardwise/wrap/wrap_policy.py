"""The wrap policy chooses the units: which parameters are gathered, freed and reduced together.

    embed | blocks.0 | blocks.1 | ... | norm head        a unit between two bars

By default the blocks are the model's repeated class (the class whose instances in a list hold the
most parameters), and each module that owns parameters outside of them is a unit of its own. Small
neighbours are merged. A parameter shared between units moves to one unit, used by the smallest
module that holds all its users.

`units=` takes another rule: a class (or several), a pattern of module names
("encoder.layers.*"), a size in bytes, or a function `(name, module) -> bool` that says where a unit
begins.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise.core.errors import InputError, bad
from shardwise.core.tools.structure import uncompiled

Rule = str | int | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


@dataclass
class UnitSpec:
    """One unit to be: the modules whose forward uses it, and its parameters by full name."""

    name: str
    modules: list[nn.Module]
    shared: bool = False  # its module holds the modules of other units: never merged
    block: bool = False  # asked for by the rule: merged within bounds only
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def stored_bytes(self) -> int:
        """Without padding."""
        return sum(p.numel() * p.element_size() for _, p in self.params)


def choose(
    root: nn.Module,
    rule: Rule = "auto",
    least: int = 0,
    most: int = 0,
    apart: Callable[[UnitSpec], object] = lambda _: None,
    alone: Collection[str] = (),
) -> list[UnitSpec]:
    """The units of `root`, in the order in which its modules were defined.

    Neighbours below `least` bytes are merged, up to `most` bytes (0: no merging), if `apart` is
    equal for both. The modules named in `alone` are units of their own, and the other parts of
    blocks that contain them are units as if there were no block.
    """
    if isinstance(rule, bool):  # an int in Python, but not a number of bytes
        raise _no_rule(rule)
    tops = _tops(root, rule)
    divided = {top for top in tops for name in alone if f"{name}.".startswith(f"{top}.")}
    tops = {name: module for name, module in tops.items() if name not in divided}
    tops |= {name: root.get_submodule(name) for name in alone}
    by_size = isinstance(rule, int)
    specs = [UnitSpec(n, [m], block=n in tops or by_size) for n, m in _walk(root, "", tops)]
    _share_out(root, specs)
    specs = [spec for spec in specs if spec.params]
    if not specs:
        raise bad(
            f"a model without parameters ({type(root).__name__})",
            "a module with at least one parameter",
            "a model to train",
        )
    if by_size:
        most = least = rule
    return list(_merged(specs, least, most, apart))


def blocks(root: nn.Module, rule: Rule = "auto") -> dict[str, nn.Module]:
    """The modules at which a unit begins, by name; for a size, the repeated blocks."""
    return _tops(root, "auto" if isinstance(rule, int) else rule)


def _tops(root: nn.Module, rule: Rule) -> dict[str, nn.Module]:
    """The modules at which a unit begins, outermost only; none for a size."""
    if isinstance(rule, int):
        if rule <= 0:
            raise bad(f"units={rule}", "a positive number of bytes", "units=2**24")
        return {}
    fits = _fits(root, rule)
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{top}.") for top in found)
        if name and not inside and runs(module) and fits(name, module):
            found[name] = module
    if not found and rule != "auto":
        names = [name for name, module in root.named_modules() if name and runs(module)][:6]
        raise bad(
            f"units={_shown(rule)}, which matches no module that {type(root).__name__} calls",
            f"a class or pattern of its modules: {', '.join(names)}, ...",
            'units="auto"',
        )
    return found


def _fits(root: nn.Module, rule: Rule) -> Callable[[str, nn.Module], bool]:
    if rule == "auto":
        kind = _block_class(root)
        return lambda _, module: type(uncompiled(module)) is kind
    if isinstance(rule, str):
        return lambda name, _: fnmatch(name, rule)
    if isinstance(rule, type):
        return lambda _, module: isinstance(uncompiled(module), rule)
    if isinstance(rule, tuple) and all(isinstance(kind, type) for kind in rule):
        return lambda _, module: isinstance(uncompiled(module), rule)
    if isinstance(rule, int | tuple) or not callable(rule):
        raise _no_rule(rule)
    return _asked(rule)


_INSTEAD = 'units="auto", or units=lambda name, module: name.startswith("blocks.")'


def _asked(rule: Callable[[str, nn.Module], bool]) -> Callable[[str, nn.Module], bool]:
    """The user's function, with checks of its arguments and of its result, a bool."""
    allowed = "a function of a module's full name and the module that returns True or False"
    try:
        inspect.signature(getattr(rule, "forward", rule)).bind("name", "module")
    except TypeError as error:
        raise bad(f"units={_shown(rule)}, which fails ({error})", allowed, _INSTEAD) from None

    def answer(name: str, module: nn.Module) -> bool:
        found = rule(name, module)
        if not isinstance(found, bool):
            what = f"which returns {_shown(found)} for the module {name}"
            raise bad(f"units={_shown(rule)}, {what}", allowed, _INSTEAD)
        return found

    return answer


def _no_rule(rule: object) -> InputError:
    return bad(f"units={_shown(rule)}", "a class, a pattern, a size or a function", _INSTEAD)


def _shown(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)[:60]


def _block_class(root: nn.Module) -> type[nn.Module] | None:
    """The class of the repeated blocks: the heaviest one that occurs several times in a list."""
    weight: dict[type[nn.Module], int] = defaultdict(int)
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for held in [list(m.children()) for m in root.modules() if isinstance(m, lists)]:
        kinds = [type(uncompiled(child)) for child in held]
        for child in [c for c in held if runs(c) and kinds.count(type(uncompiled(c))) > 1]:
            weight[type(uncompiled(child))] += sum(p.numel() for p in child.parameters())
    heaviest = max(weight, key=lambda kind: weight[kind], default=None)
    return heaviest if heaviest and weight[heaviest] else None


def runs(module: nn.Module) -> bool:
    """Whether its class defines a forward: lists of modules or parameters are never called."""
    return type(uncompiled(module)).forward is not nn.Module.forward


def _read(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that it reads itself: its own, and its uncalled submodules'."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not runs(child):
            yield from _read(child)
    if is_parametrized(module):
        yield from module.get_submodule("parametrizations").parameters()


def _walk(
    module: nn.Module, name: str, tops: dict[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, and outside of them the outermost modules that own parameters themselves. A module
    with own parameters may also read those of its children (nn.MultiheadAttention reads
    out_proj.weight), so the walk does not descend into it, unless it contains blocks.
    """
    owns = next(_read(uncompiled(module)), None) is not None and runs(module)
    holds = any(top.startswith(f"{name}." if name else "") for top in tops)
    if name in tops or (owns and not holds):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, tops)


def _share_out(root: nn.Module, specs: list[UnitSpec]) -> None:
    """Give every parameter to one unit; those of several or none to one for their common root."""
    users: dict[nn.Parameter, list[UnitSpec]] = defaultdict(list)
    for spec in specs:
        for p in dict.fromkeys(p for module in spec.modules for p in module.parameters()):
            users[p].append(spec)
    common: dict[str, UnitSpec] = {}
    for name, p in root.named_parameters():
        if len(users[p]) == 1:
            users[p][0].params.append((name, p))
            continue
        own = {owner: {*m.parameters(recurse=False)} for owner, m in root.named_modules()}
        owners = [owner for owner, params in own.items() if p in params]
        where = _common(owners)
        while where and not runs(root.get_submodule(where)):  # nobody calls it: no hook would fire
            where = where.rpartition(".")[0]
        spec = common.setdefault(where, UnitSpec(where, [root.get_submodule(where)], True))
        spec.params.append((name, p))
    specs[:0] = list(common.values())


def _common(names: list[str]) -> str:
    """The dotted path of the smallest module that holds all of these."""
    split = [name.split(".") if name else [] for name in names]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _merged(
    specs: list[UnitSpec], least: int, most: int, apart: Callable[[UnitSpec], object]
) -> Iterator[UnitSpec]:
    """Join neighbours while one is below `least` and both together are within `most`."""
    held: UnitSpec | None = None
    for spec in specs:
        alike = held is not None and apart(held) == apart(spec)
        if held is not None and alike and _joins(held, spec, least, most):
            held.block |= spec.block
            held.modules += spec.modules
            held.params += spec.params
            continue
        if held is not None:
            yield held
        held = spec
    if held is not None:
        yield held


def _joins(a: UnitSpec, b: UnitSpec, least: int, most: int) -> bool:
    small = min(a.stored_bytes, b.stored_bytes) < least and not (a.shared or b.shared)
    # a separate unit for a norm beside a large head would cost a message and save little memory
    pair = len(a.modules) == len(b.modules) == 1 and not (a.block or b.block)
    return small and (pair or a.stored_bytes + b.stored_bytes <= most)
