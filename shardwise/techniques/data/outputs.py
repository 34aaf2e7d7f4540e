"""The tensors of a module's output; gradients and weights that ranks scale by other factors.

`torch.nn.utils.clip_grad_norm_` over pieces of parameters takes the norm of one rank's pieces, so
that each rank scales by its own factor. No hook sees that call, but its effect shows:

    backward ends     a sample of the gradients, and their version
    optimizer steps   all gradients have another version: are they one factor times the sample?
                      none has: the factor is 1
    next backward     ranks add up 1, the factor and its square (0 if it is not one factor); factors
                      with a variance differ, which is an InputError on all ranks

A factor that is the same on all ranks (sw.clip_grad_norm, a gradient scaler) has no variance;
clip_grad_value_ is not one factor.  Shards of weights that the program writes to between two steps
are compared as well, once it has done so: before, only their versions are noted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.agreement.doubts import Doubts
from shardwise.core.errors import bad
from shardwise.core.tools.tree import PLAIN, mapped, parts
from shardwise.flat.flat_parameter import Flat

#: Types without tensors.
_PLAIN = (*PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Objects to look into in one output; what is beyond counts as not seen.
_MOST = 4096


class Output:
    """What is in a module's output.

    tensors   all that were found: in containers, their subclasses, dataclasses and other objects.
              For logits that are computed later (kernels/logits.py) it is what they are computed
              from
    opaque    whether some part cannot be looked into, such as a generator, a closure or a module:
              it may hold tensors, or read weights later
    """

    def __init__(self, out: Any) -> None:
        self.tensors: list[Tensor] = []
        self.opaque = False
        self._seen: dict[int, Any] = {}
        self._look(out)
        self._seen.clear()

    def _look(self, x: Any) -> None:
        if isinstance(x, Tensor):
            # a tensor of exactly this class first: the others may be asked only by attribute
            self.tensors.append(x if type(x) is Tensor else getattr(x, "computed_from", x))
        elif not (isinstance(x, _PLAIN) or id(x) in self._seen):
            self._seen[id(x)] = x
            module = isinstance(x, torch.nn.Module)
            inside = None if module or len(self._seen) > _MOST else parts(x)
            self.opaque |= inside is None
            for part in inside or ():
                self._look(part)

    def shares(self, flats: Iterable[Flat]) -> bool:
        known = {flat.full.untyped_storage()._cdata for flat in flats}
        with torch._C.DisableTorchFunctionSubclass():
            dense = [x for x in self.tensors if x.layout is torch.strided]
            return any(x.untyped_storage()._cdata in known for x in dense)

    @staticmethod
    def copied(out: Any, flats: Sequence[Flat]) -> Any:
        """An output with copies of the tensors in it that are parts of full parameters."""
        if not flats:
            return out
        return mapped(lambda x: x.clone() if Output(x).shares(flats) else x, out, Tensor)


def tensors_in(out: Any) -> Iterator[Tensor]:
    yield from Output(out).tensors


def watch(tensors: Iterable[Tensor], act: Callable[[], None]) -> bool:
    """Call `act` when a gradient of one arrives; returns whether any requires one.

    If a view is changed in place, gradients no longer pass the node that made it, but they still
    reach that of the tensor it is a view of:

        h --view--> out          out += x:        h --CopySlices(view, add)--> h' --view--> out
    """
    with torch._C.DisableTorchFunctionSubclass():  # sharded logits would be gathered
        graded = [x for x in tensors if x.requires_grad]
        for x in (x for each in graded for x in (each, each._base) if x is not None):
            if x.requires_grad and not x.is_leaf:  # a leaf's hook would stay for every pass
                x.register_hook(lambda _: act())
    return bool(graded)


# --- scaled gradients ---------------------------------------------------------------------------

#: Elements of a flat parameter's gradient that are compared.
_SAMPLE = 64
_HOW = "scaled by another factor", "clipped at another value"


#: The gradient of a flat parameter, its version, and of how many parameters it is.
Gradient = Callable[[], tuple[Tensor | None, int, int]]


class Scaling:
    """How a program changes `gradients`: by a factor, or by clipping each element at a bound.
    `compares` on all ranks or on none. `warn`: they are weights, of which ranks are warned.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        dtypes: Iterable[torch.dtype],
        *,
        compares: bool = True,
        warn: Callable[[Exception], None] | None = None,
    ) -> None:
        self.gradients, self.compares, self.warn = gradients, compares, warn
        self.samples = warn is None  # else from the first change on
        self.rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self.noted: list[tuple[Gradient, Tensor | None, int]] = []
        self.changed: list[tuple[Tensor, Tensor]] = []
        self.kept = False  # an optimizer stepped on the gradients of the backward pass

    def note(self) -> None:
        """A backward pass has ended, or a step: remember its gradients, or weights."""
        self.changed, self.kept, self.noted = [], False, []
        for each in self.gradients:
            gradient, version, _ = each()
            if gradient is not None:
                sample = _sample(gradient).clone() if self.samples else None
                self.noted.append((each, sample, version))

    def look(self) -> int:
        """An optimizer is about to step: see which gradients have changed, and how often."""
        self.kept, writes = bool(self.noted), 0
        for noted in list(self.noted):
            (gradient, now, count), sample, version = noted[0](), *noted[1:]
            self.kept &= gradient is not None and now == version
            writes += 0 if gradient is None else now - version
            if gradient is not None and count and now - version >= count:
                self.noted.remove(noted)
                self.changed += [] if sample is None else [(sample, _sample(gradient).clone())]
        self.samples |= writes > 0
        return writes

    @torch.no_grad()
    def joined(self, numbers: Tensor) -> Tensor:
        """Numbers that the ranks sum; first the factor's and the bound's, 0 if there is none."""
        if not self.compares:
            return numbers
        if self.warn is not None:
            self.look()
        if not self.changed:
            return torch.cat([numbers.new_tensor([self.kept] * 3 + [0] * 3), numbers])
        old, new = (torch.cat([pair[k] for pair in self.changed]).double() for k in (0, 1))
        factor = (old @ new) / (old @ old)
        off = torch.linalg.vector_norm(new - factor * old) / torch.linalg.vector_norm(new)
        one = (off <= self.rounding).double()  # 0 where it is NaN
        moved = torch.where(new == old, 0.0, new.abs())
        bound = moved.max()
        clipped = ((moved == 0) | (moved == bound)).all() & (bound > 0) & (one == 0)
        own = [torch.where(one > 0, factor**k, 0.0) for k in range(3)]
        own += [torch.where(clipped, bound**k, 0.0) for k in range(3)]
        return torch.cat([torch.stack(own).to(numbers), numbers])

    def compared(self, sums: Sequence[float]) -> Sequence[float]:
        """The sums over all ranks without those. Raises InputError on all ranks if they scaled by
        different factors, or clipped at different bounds.
        """
        if not self.compares:
            return sums
        for how, (count, total, squares) in zip(_HOW, (sums[:3], sums[3:6]), strict=True):
            mean = total / max(count, 1)
            least = max(1e-3, 2 * self.rounding) * mean
            if count > 1 and squares / count - mean * mean > least * least:
                if self.warn is None:
                    raise bad(
                        f"gradients that each rank {how} before the last optimizer step. "
                        "(torch.nn.utils.clip_grad_norm_ on a sharded module takes the norm of one "
                        "rank's parameters.)",
                        "one factor or bound on all ranks. The step was wrong: continue from a "
                        "checkpoint before it",
                        "sw.clip_grad_norm(module, max_norm)",
                    )
                what, one = f"weights that each rank {how}", "one factor or bound on all ranks"
                self.warn(bad(f"{what} after an optimizer step", one, "the same line on each rank"))
        return sums[6:]


class Scalings(NamedTuple):
    """Of sharded flat parameters."""

    gradients: Scaling
    weights: Scaling


def scalings_of(flats: Iterable[Flat], doubts: Doubts) -> Scalings:
    split = [flat for flat in flats if flat.trained and flat.split]
    make = partial(Scaling, dtypes=[flat.dtype for flat in split], compares=bool(split))
    of = ([partial(each, flat) for flat in split] for each in (_gradient_of, _weights_of))
    return Scalings(make(next(of)), make(next(of), warn=partial(doubts.warn, "writes")))


def _gradient_of(flat: Flat) -> tuple[Tensor | None, int, int]:
    x = flat.grads.gshard
    return x, 0 if x is None else x._version, sum(p.grad is not None for p in flat.params)


def _weights_of(flat: Flat) -> tuple[Tensor | None, int, int]:
    return flat.shard, sum(p._version for p in flat.params), len(flat.params)


def _sample(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[:: max(1, gradient.numel() // _SAMPLE)]
