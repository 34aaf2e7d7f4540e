"""Checksums of tensors, and what the ranks compare with them.

folded      WEIGHTS sums, each of every WEIGHTS-th element of flat x
weighted    their sum with the weights cos(i): close for tensors that are close
exact       their sum with whole weights: for integers, and for the bits of floats

The weights are fixed: a sum changes if elements change or swap places. Results of one microbatch on
two ranks (rerun.py) are the loss, then gradients by name; they must be equal to the last bit.

    own(k)      of the first microbatch of data rank k, by rank k
    again(k)    of the same, by the next rank

Differences between ranks that may be intended (`Doubts`); each kind is warned about once:

    passes     backward passes of a loop's step, whose gradients are summed at once
    writes     of the program to parameters, optimizer states and gradients, between steps
    arguments  numbers and words that a loop's forward takes beside tensors, as a temperature
    graph      the operations of a loop's loss: that of the backward pass that runs, whose call is
               on the stack of this thread, or of the one that waits for it
    hooks      of the program on modules and parameters
    numbers    of modules (epsilon, the rate of a dropout), words ("mean"), and functions

Graphs, hooks and numbers are compared every so many steps, the others in each.
"""

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.hook import program_hooks
from shardwise.core.tools.tree import leaves
from shardwise.techniques.data.flat.flat_parameter import Flat

#: The number of weights, which repeat. It is prime, so that it divides no tensor's rows.
WEIGHTS = 509
#: A large prime, which makes the whole weights differ.
PRIME = 2_305_843_009_213_693_951
#: The number of checksums of shares, a prime; the square of each, summed over 8192 ranks, is exact.
SHARE_CHECKSUMS = 1_048_573
#: By bytes of an element, the integers that have its bits.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of each WEIGHTS-th element of flat `x`, in `dtype`."""
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).detach().reshape(-1)
    rows = flat[: len(flat) - len(flat) % WEIGHTS].view(-1, WEIGHTS)
    folded = rows.sum(0, dtype=dtype)
    rest = flat[rows.numel() :]
    folded[: len(rest)] += rest
    return folded.nan_to_num(1, 2, 3)  # for masks that contain -inf


def weighted_sum(folded: Tensor) -> Tensor:
    """The sum of a folded tensor of doubles: a double, 0-d."""
    return folded.dot(torch.arange(WEIGHTS, dtype=torch.float64, device=folded.device).cos())


def weighted(x: Tensor) -> Tensor:
    return weighted_sum(fold(x, torch.float64))


def exact_sum(folded: Tensor) -> Tensor:
    """The sum of a folded int64 tensor: 0-d. An even weight would lose the sign of a double."""
    weights = torch.arange(1, 2 * WEIGHTS, 2, dtype=torch.int64, device=folded.device)
    return (folded * weights * PRIME).sum()


def bits_sum(x: Tensor) -> Tensor:
    """The exact sum of the bits of `x`, on its device."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return exact_sum(fold(x.detach().reshape(-1).view(INTEGERS[x.element_size()]), torch.int64))


def has_bits(x: object) -> TypeGuard[Tensor]:
    """Whether `bits_sum` can tell what it is: plain values, which nothing computed."""
    return type(x) is Tensor and x.layout == torch.strided and not (x.is_meta or x.grad_fn)


def text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def versions(states: Iterable[Mapping[Any, Any]]) -> int:
    """A number that changes if a tensor in `states` is written to, added, or replaced."""
    every = (x for state in states for x in state.values())
    return sum(id(x) + x._version for x in every if isinstance(x, Tensor))


def beside_tensors(batch: Any) -> int:
    """A hash of the numbers in a batch; 0 without any."""
    found = sorted(map(repr, leaves(batch, NUMBERS)))
    return text_hash(repr(found)) if found else 0


def batch_checksum(batch: Any, device: torch.device) -> Tensor:
    """Three numbers: an exact checksum of shapes and integers, then a sum and a norm of floats."""
    exact = torch.zeros((), dtype=torch.int64, device=device) + beside_tensors(batch)
    sums, sizes = [exact.new_zeros(()).double()], [exact.new_zeros(()).double()]
    tensors = leaves(batch, Tensor, objects=True)
    for x in (x for x in tensors if type(x) is Tensor and x.layout == torch.strided):
        exact = exact + text_hash(f"{x.shape}")
        with suppress(RuntimeError):  # torch cannot sum quantised and float8 tensors
            if x.is_floating_point() or x.is_complex():
                folded = fold(x, torch.float64)
                sums.append(weighted_sum(folded).to(device))
                sizes.append(folded.norm().to(device))
            else:
                exact = exact + exact_sum(fold(x, torch.int64)).to(device)
    return torch.stack(
        [(exact % 2**52).double(), torch.stack(sums).sum(), torch.stack(sizes).sum()]
    )


def share_numbers(batch: Any, device: torch.device) -> Tensor:
    """A checksum of a batch, a whole number, and its square: doubles that ranks may sum."""
    if not any(x.numel() for x in leaves(batch, Tensor, objects=True)):
        return torch.zeros(2, dtype=torch.float64, device=device)
    exact, sums, sizes = batch_checksum(batch, device)
    mixed = exact.long() + sums.view(torch.int64) * 31 + sizes.view(torch.int64) * 37
    share = (mixed % SHARE_CHECKSUMS).double()
    return torch.stack([share, share**2])


# --- reruns -------------------------------------------------------------------------------------

LOSS: Final = "the loss"
#: A relative difference that hosts of two kinds of processors reach by rounding.
ROUNDING, ROUNDING_16_BIT = 1e-5, 1e-2


class Values(NamedTuple):
    """Of a tensor: its bits as a number, a weighted sum, the norm, and what is rounding."""

    bits: int
    total: float
    norm: float
    rounding: float

    def differs(self, other: "Values") -> bool:
        """Whether they differ by more than rounding."""
        close = self.rounding * max(self.norm, other.norm)
        return not (abs(self.total - other.total) <= close and abs(self.norm - other.norm) <= close)


def numbers_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """The `Values` of a tensor, on its device."""
    wide = torch.view_as_real(x).double() if x.is_complex() else x.double()
    rounding = ROUNDING_16_BIT if x.element_size() < 4 else ROUNDING
    return bits_sum(x), weighted(wide), wide.norm(), rounding


class Computed:
    """Of one microbatch, as one rank computed it: the loss and each gradient."""

    def __init__(self) -> None:
        self.numbers: dict[str, tuple[Tensor, Tensor, Tensor, float]] = {}

    def see(self, name: str, x: Tensor) -> None:
        self.numbers[name] = numbers_of(x)

    def hash(self, names: Sequence[str], rank: int) -> Tensor:
        """A number of all bits, 0-d, which depends on the rank of the microbatch. Otherwise the
        same fault in two passes of one rank would cancel.
        """
        (device,) = {bits.device for bits, *_ in self.numbers.values()}
        none = torch.zeros((), dtype=torch.int64, device=device)
        bits = [self.numbers[name][0] if name in self.numbers else none for name in names]
        return exact_sum(fold(torch.stack(bits), torch.int64)) * (2 * rank + 1)

    def values(self) -> dict[str, Values]:
        """Waits for the device."""
        return {
            name: Values(int(bits), total.item(), norm.item(), rounding)
            for name, (bits, total, norm, rounding) in self.numbers.items()
        }


class Reruns(NamedTuple):
    """A rank's results of one step for its own microbatch, and again for another rank's.

    names    of all that may have a gradient
    rank     this data rank
    of       the data rank whose microbatch it computed again
    """

    own: Computed
    again: Computed
    names: Sequence[str]
    rank: int
    of: int

    def difference(self, hashes: int, device: torch.device) -> Tensor:
        """A double; the sum over all ranks is 0 if all computed the same."""
        names = (LOSS, *self.names)
        own, again = self.own.hash(names, self.rank), self.again.hash(names, self.of)
        return (own.remainder(hashes) - again.remainder(hashes)).double().to(device)


#: What a rank shows the others: its own values, those of the microbatch of `of`, and `of`.
Shown = tuple[Mapping[str, Values], Mapping[str, Values], int]


def shown(reruns: Reruns | None) -> Shown | None:
    """What the ranks exchange if the sum is not 0."""
    return reruns and (reruns.own.values(), reruns.again.values(), reruns.of)


def require_same(every: Sequence[Shown | None], step: int, place: Callable[[int], str]) -> None:
    """Raise InputError if two ranks computed different values; warn if they differ by rounding.
    `every` has the data ranks; `place` names one. Of several pairs that differ, the error has the
    rank that is in most of them: with three or more ranks, the one that is wrong.
    """
    pairs = [
        (each[2], rank)
        for rank, each in enumerate(every)
        if each is not None and _first(every, each[2], rank) is not None
    ]
    if not pairs:
        return
    count = Counter(rank for pair in pairs for rank in pair)
    of, rank = max(pairs, key=lambda pair: sum(count[each] for each in pair))
    name, own, again = _first(every, of, rank) or (LOSS, None, None)
    both = f"on {place(of)}: {_text(own)}; computed again on {place(rank)}: {_text(again)}"
    if own and again and not own.differs(again):
        warnings.warn(
            f"{name} in step {step} {both}. They differ by rounding: the processors are not of one "
            "kind, or a kernel adds in no fixed order (torch.use_deterministic_algorithms).",
            stacklevel=2,
        )
        return
    suspect = max((of, rank), key=lambda each: count[each])
    several = count[of] != count[rank]
    raise bad(
        f"{name} in step {step} {both}",
        "the same loss and gradients of a microbatch on each rank that computes it",
        f"{'another machine for ' + place(suspect) if several else 'a test of both machines'}, and "
        "a run that continues from a checkpoint before this step. If other runs differ too, "
        "something that the model computes depends on the rank",
    )


def _first(
    every: Sequence[Shown | None], of: int, rank: int
) -> tuple[str, Values | None, Values | None] | None:
    """The first difference in the order of computation: the loss, then gradients from the last."""
    theirs, again = every[of], every[rank]
    if theirs is None or again is None:
        return None
    own, repeated = theirs[0], again[1]
    for name in dict.fromkeys((*own, *repeated)):
        a, b = own.get(name), repeated.get(name)
        if a is None or b is None or a.bits != b.bits:
            return (name if name == LOSS else f"the gradient of {name}"), a, b
    return None


def _text(values: Values | None) -> str:
    return "none" if values is None else f"norm {values.norm:.9g}"


# --- doubts -------------------------------------------------------------------------------------

Options = dict[str, Any]
NUMBERS: Final = int, float, bool
#: Names of attributes that may differ between ranks, or that others compare; and those of settings.
_OF_A_RANK: Final = "rank", "dynamo", "training"
_MOST_ITEMS, _MOST_ELEMENTS = 64, 2**16  # of a list among them, of a tensor
_SETTINGS: Final = {"config", "cfg", "args", "hparams", "params", "options"}
KINDS: Final = {
    "passes": "If the loss of each pass is divided by their number, this is no mistake.",
    "writes": "If each rank writes to what it alone holds, this is no mistake.",
    "arguments": "If the batch decides them, this is no mistake.",
    "graph": "If the batch decides which operations a rank computes, this is no mistake.",
    "hooks": "A hook that only reads may stay.",
    "numbers": "A number that a module only records may stay.",
}


class Doubts:
    """What this rank has of each kind since the step before."""

    def __init__(self, flats: Sequence[Flat], modules: Mapping[str, nn.Module]) -> None:
        self.flats, self.modules = flats, modules
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
            numbers = _values_of(owner) if isinstance(owner, nn.Module) else {}
            for kind, own in ("hooks", program_hooks(owner)), ("numbers", numbers):
                found[kind] |= {f"{kind} of {name or 'the model'}": own} if own else {}
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


def numbers_of_attributes(owner: object) -> Options:
    """The numbers among the attributes of a module, and among those of its `config`, or `args`."""
    own = {n: x for n, x in vars(owner).items() if not any(word in n for word in _OF_A_RANK)}
    found = {name: x for name, x in own.items() if isinstance(x, NUMBERS)}
    for name in own.keys() & _SETTINGS if isinstance(owner, nn.Module) else ():
        if isinstance(getattr(own[name], "__dict__", None), dict):
            values = numbers_of_attributes(own[name]).items()
            found |= {f"{name}.{key}": x for key, x in values}
    return found


def floats_of(module: nn.Module) -> Options:
    """The floats of a module that is made: epsilon, the rate of a dropout, those in its lists and
    dicts; and the bits of its tensors that are no buffers.
    """
    found, tensors = numbers_of_attributes(module), Options()
    own = ((n, x) for n, x in vars(module).items() if not any(word in n for word in _OF_A_RANK))
    for name, x in own:
        found |= numbers_in(name, x)
        if has_bits(x) and x.numel() <= _MOST_ELEMENTS:
            tensors[name] = int(bits_sum(x))
    return {name: x for name, x in found.items() if type(x) is float} | tensors


def _values_of(module: nn.Module) -> Options:
    """Its numbers, but for those of a rank or of dynamo, words, and what else it computes with."""
    functions, found = (FunctionType, BuiltinFunctionType), numbers_of_attributes(module)
    for name, x in vars(module).items():
        if isinstance(x, functions):
            found[name] = x.__qualname__
            with suppress(ValueError):  # a name that has no value yet
                held = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
                found |= numbers_in(f"{name}.closure", held)
        elif isinstance(x, str) and x.isalpha():
            found[name] = x
    return found


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
        with suppress(AttributeError, RuntimeError):  # a tensor, which the pass has freed
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
