"""Consistency checks: values that must be equal on several ranks are compared by checksums.

    when                         what                                      among the ranks of
    before sharding              plan, model, table, optimizer, options,   the world
                                 the code of functions
    before the first step        the batch                                 tp and pp axes
                                 the batch: equal ones are a mistake       the data axes
    in the first three steps     the loss, and each gradient of a          the tp axis
                                 replicated parameter
    each evaluation              the batch                                 cp, tp and pp axes
    every `check_every` steps    the same as in the first steps            tp and pp axes

agreement/same_on_ranks.py has what ranks compare by numbers that they sum anyway.

The ranks of a tp axis compute one step together, and every replicated parameter's gradient
redundantly.  If such a parameter is applied to a part of the features, its gradient is a partial
sum, which no shape error reveals.  So ranks exchange checksums: sums with fixed weights, which
differ if the tensors differ.  They do so in three steps, because a gradient of zeros proves nothing
(an adapter behind one initialised to zero).  Steps that are skipped in fp16 do not count.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.agreement.checksum import (
    Options,
    bits_sum,
    has_bits,
    text_hash,
    weighted,
)
from shardwise.agreement.doubts import (
    floats_of,
    identity,
    layers_of,
    read_by,
    reads,
    values_read,
)
from shardwise.agreement.same_on_ranks import SameOnRanks
from shardwise.comm.move import all_gather, all_gather_object
from shardwise.comm.world import Axis, World
from shardwise.core.errors import bad
from shardwise.core.tally import Key, Tally
from shardwise.core.tools.arguments import rank_names
from shardwise.engine.optimizer.norm import squared_norm
from shardwise.flat.flat_parameter import Flat

#: Relative difference of losses and gradients that counts as rounding.
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 3e-2
#: A gradient whose norm is below this fraction of the total norm counts as rounding.
NEGLIGIBLE = 1e-5
#: Each gradient is compared in this many first steps; skipped steps do not count.
CHECKED_STEPS = 3
#: Characters of a value that an error shows.
EXCERPT = 120
_READ_BY = "the numbers and functions read by "

U = TypeVar("U")


# --- arguments -------------------------------------------------------------------------------


def require_same(
    world: World,
    parts: Mapping[str, object],
    allowed: str = "the same model and the same arguments on all ranks",
) -> None:
    """Raise InputError on every rank if a named argument differs from rank 0's.
    All ranks must call it.  Functions are compared by their code, and memory addresses are ignored.
    The ranks exchange one hash, and only if it differs what they have.
    """
    if world.size == 1:
        return
    texts: dict[str, Any] = {name: _text_of(part) for name, part in parts.items()}
    texts |= {_READ_BY + name: _numbers_of(x) for name, x in parts.items() if callable(x)}
    own = torch.tensor([text_hash(repr(texts))], dtype=torch.int64, device=world.device)
    if len(set(torch.cat(all_gather(own, world.everyone)).tolist())) == 1:
        return
    every = all_gather_object(texts, world)
    for name in dict.fromkeys(chain.from_iterable(every)):
        values = [each.get(name, {} if name.startswith(_READ_BY) else "none") for each in every]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            if name.startswith(_READ_BY):
                pairs = [{*each.items()} for each in (values[others[0]], values[0])]
                other, first = (dict(sorted(pairs[k] - pairs[1 - k])) for k in (0, 1))
                warnings.warn(
                    f"{name} on {rank_names(others)} are {other}, on rank 0 {first}: if they are "
                    "not for logging, ranks compute different functions.",
                    stacklevel=2,
                )
                continue
            first, other = _excerpts(values[0], values[others[0]])
            instead = "the same call on every rank; only the data may differ"
            if "the function" in first:
                instead = (
                    "the same function on every rank; a number that differs between ranks, such as "
                    'a temperature or a time, goes into the batch: batch["temperature"]'
                )
            raise bad(
                f"{name} of {rank_names(others)}, which differs from that of rank 0: {other} "
                f"instead of {first}",
                allowed,
                instead,
            )


def _signature(model: nn.Module) -> list[Any]:
    """What ranks compare of a model: its tensors, and the classes and numbers of its modules."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found: list[Any] = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    for name, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        mode = "training" if module.training else "evaluation"
        own = module.extra_repr() if of_torch else floats_of(module)
        found.append((name, type(module).__qualname__, own, mode))
    own = (m for m in model.modules() if not type(m).__module__.startswith("torch."))
    forwards = (getattr(m.forward, "__func__", m.forward) for m in own)
    return [*found, *map(_function_text, {id(each): each for each in forwards}.values())]


def _text_of(part: object) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text_of(part[key])}" for key in part) + "}"
    if isinstance(part, list | tuple):
        return "[" + ", ".join(map(_text_of, part)) + "]"
    if isinstance(part, set | frozenset):  # whose order differs between processes
        return "{" + ", ".join(sorted(map(_text_of, part))) + "}"
    if isinstance(part, nn.Module):
        return _text_of(_signature(part))
    if callable(part) and not isinstance(part, type):
        return _function_text(part)
    return re.sub(r" at 0x[0-9a-f]+|,? ?device='?[a-z]+(:[0-9]+)?'?", "", repr(part))


def _function_text(function: Any) -> str:
    read = chain.from_iterable(read_by(layer).items() for layer in layers_of(function))
    # other values may differ: a device, a file, a rank that prints
    floats = {name: x for name, x in read if type(x) is float}
    *_, innermost = layers_of(function)
    return f"the function {identity(innermost)}{floats or ''}"


def _numbers_of(function: Any) -> Options:
    """What a function or the forwards of a model read, and the bits of tensors."""
    if isinstance(function, nn.Module):
        return reads({}, function.modules())
    read = _with_weights(read_by(function).items())
    plain = ((n, x.detach() if isinstance(x, nn.Parameter) else x) for n, x in read)
    tensors = ((n, x) for n, x in plain if has_bits(x))
    return values_read(function) | {n: int(bits_sum(x)) for n, x in tensors if "rank" not in n}


def _with_weights(read: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """And the weights of modules, as of a teacher; of sharded ones each rank has another part."""
    for name, x in read:
        yield name, x
        if isinstance(x, nn.Module) and all(type(m._parameters) is dict for m in x.modules()):
            yield from ((f"{name}.{key}", p) for key, p in x.named_parameters())


def _excerpts(*texts: str) -> list[str]:
    equal = sum(1 for _ in takewhile(lambda chars: len({*chars}) == 1, zip(*texts, strict=False)))
    begin = max(0, equal - EXCERPT // 2)
    return [
        f"'...{text[begin:][:EXCERPT]}...'" if len(text) > EXCERPT else f"'{text}'"
        for text in texts
    ]


# --- batches, losses, gradients --------------------------------------------------------------


class ConsistencyCheck:
    """Compares batches along the axes of `same`, losses and gradients along the tp axis.
    `compares`: whether the current step compares gradients.
    """

    def __init__(self, same: SameOnRanks, axis: Axis) -> None:
        self.same, self.axis, self.device, self.every = same, axis, same.device, same.every
        self.checked = 0  # steps so far that were not skipped
        self.compares = False
        #: what the first step does with its batch after this comparison (first_step.py)
        self.before_first: Callable[[Any], None] | None = None

    def begin(self, step: int, batch: Any) -> dict[Key, Tally]:
        """Decide what step `step` (from 0) compares, and compare the batch. Returns what this rank
        sent to compare the first step with the plain model: no part of the step.
        """
        again = self.every > 0 and step % self.every == 0
        self.compares = self.axis.size > 1 and (again or self.checked < CHECKED_STEPS)
        if again or not step:
            self.same.require_batch(batch)
        elif self.every and any(axis.size > 1 for axis in (*self.same.others, *self.same.batches)):
            self.same.see_batch(batch)
        if self.before_first is None:
            return {}
        before = self.axis.ledger.lines
        self.before_first(batch)
        self.before_first = None
        return self.axis.ledger.since(before)

    def end(self, *, skipped: bool) -> None:
        self.checked += not skipped

    def compare_gradients(
        self, arriving: Iterator[U], loss: Tensor, flats: Sequence[Flat]
    ) -> Iterator[U]:
        """`arriving`, after the comparison that this step makes once all gradients are reduced.
        Raises InputError if the loss or a gradient differs between ranks.
        """
        if not self.checked:
            self._warn_of_others()
        if not self.compares:
            return arriving
        arrived = list(arriving)
        with self.axis.ledger.phase("check"):
            self._require(loss, flats)
        return iter(arrived)

    def _warn_of_others(self) -> None:
        """Warn of parameters that get a gradient and belong to the loss, not to the model."""
        own = {id(p) for _, p in self.same.doubts.params}
        layers = layers_of(self.same.doubts.functions.get("loss"))
        read = chain.from_iterable(read_by(layer).items() for layer in layers)
        others = [
            name
            for name, p in _with_weights(read)
            if isinstance(p, nn.Parameter) and p.grad is not None and id(p) not in own
        ]
        if others:
            warnings.warn(
                f"The loss computes gradients of {', '.join(others[:4])}, which the model does not "
                "have: the engine neither sums nor updates them, and each rank has those of its "
                "own rows. Make them a part of the model (a module with the model and the "
                "criterion), or wrap what holds them in sw.DDP and give it an optimizer.",
                stacklevel=4,
            )

    def _require(self, loss: Tensor, flats: Sequence[Flat]) -> None:
        names, gradients = self._gradients(flats)
        own = torch.cat([loss.detach().to(gradients).view(1), gradients])
        everyone = torch.stack(all_gather(own, self.axis)).cpu()
        losses, (sums, sizes) = everyone[:, 0], everyone[:, 1:].chunk(2, dim=1)
        dtypes = {flat.grads.gshard.dtype for flat in flats if flat.grads.gshard is not None}
        close = TOLERANCE if dtypes <= {torch.float32, torch.float64} else TOLERANCE_16_BIT
        if not _close(losses, losses.abs().max() + TOLERANCE, close):  # one of zero is of rounding
            raise self._other_losses(losses.tolist())
        everything = NEGLIGIBLE * sizes.nan_to_num().norm(dim=1).max()
        for name, of_sum, size in zip(names, sums.t(), sizes.t(), strict=True):
            scale = size.nan_to_num().max() + everything
            if not (_close(of_sum, scale, close) and _close(size, scale, close)):
                raise self._other_gradients(name, size.tolist())

    def _gradients(self, flats: Sequence[Flat]) -> tuple[list[str], Tensor]:
        """The names of replicated parameters; the checksums of their gradients, then the norms."""
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        names, sums, sizes = [], [], []
        on_axis = (f for f in flats if self.axis.name in dict(f.layouts[0].axes))
        for flat in (flat for flat in on_axis if flat.trained):
            for name, layout, (low, high) in zip(
                flat.names, flat.layouts, flat.pieces, strict=True
            ):
                if layout.on(self.axis.name).cut is None:
                    gradients = flat.grads.gshard
                    piece = none.view(1) if gradients is None else gradients[low:high]
                    names.append(name)
                    sums.append(weighted(piece).to(self.device))
                    sizes.append(squared_norm(piece).sqrt().to(self.device))
        return names, torch.stack([*sums, *sizes]) if names else none.new_zeros(0)

    def _other_losses(self, losses: Sequence[float]) -> Exception:
        values = ", ".join(f"{loss:.6g}" for loss in losses)
        return bad(
            f"a loss that differs between the ranks of the {self.axis.name} axis: {values}",
            "a model that uses a sharded weight only by calling its module, and sharded features "
            "only between a colwise and a rowwise layer; the same random numbers on all ranks",
            'a style that gathers the result ("colwise_gather_output", "sequence:join")',
        )

    def _other_gradients(self, name: str, norms: Sequence[float]) -> Exception:
        module = name.rpartition(".")[0] or name
        if without := [rank for rank, norm in enumerate(norms) if not norm]:
            return bad(
                f"no gradient of {name} on {rank_names(without)} of the {self.axis.name} axis, and "
                "one on the others",
                "the same requires_grad and the same forward on all ranks of the axis",
                "the same line on every rank, without a condition on the rank",
            )
        return bad(
            f"the gradient of {name}, which differs between the ranks of the {self.axis.name} axis "
            "although the parameter is replicated: the ranks use it on different features or "
            "positions",
            "replicated parameters used on the same input with the same random numbers on all "
            "ranks, or a style in the table",
            f'in the table "{module}": "replicated" between colwise and rowwise layers, or '
            f'"{module}": "sequence" under sp',
        )


def _close(values: Tensor, size: Tensor, close: float) -> bool:
    """Whether `values` differ by at most `close` times `size`.  NaN and infinity are ignored."""
    found = values.nan_to_num(0.0, 0.0, 0.0)
    return bool(found.max() - found.min() <= close * size.nan_to_num(math.inf))
