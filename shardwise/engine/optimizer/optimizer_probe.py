"""Tries an optimizer that is not known: does it work on parts of parameters?

Three parameters train for some steps with random gradients, in ways that must agree:

    whole        | A            | B     | C       |   one optimizer
    parts        | A, first     | B, .. | C, ..   |   an optimizer on each of two ranks, over its
                 |     A, rest  |    .. |      .. |   pieces in the shape [k, 1, ..]
    in turns     | A            |                     one optimizer that steps over A, then over B,
                                | B     |             then over C, as an engine does

Both parts have different scales, so that a norm, a mean or a factor of the whole shows.  A is large
enough for optimizers that treat small matrices as vectors.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.optimizer.optimizer_groups import NAMING
from shardwise.engine.optimizer.torch_step import step_over

#: Makes an optimizer of parameters.
Make = Callable[[list[nn.Parameter]], Optimizer]
Shapes = tuple[tuple[int, ...], ...]
#: Shapes of the parameters; the first alone for optimizers that take matrices only.
SHAPES: Final = ((136, 130), (37,), (6, 5, 3, 3))
#: More than 10, so that a preconditioner that is computed every 10 steps shows.
STEPS: Final = 12
#: Where the first part ends: inside of a row.
_CUT: Final = 0.41
_RATE: Final = 0.01


class OptimizerProbe:
    """Optimizers made by `make`; `ran` says whether they step at all, on a processor or a GPU.

    works_on_parts    steps on pieces of parameters are the pieces of steps on parameters
    works_in_turns    steps over one parameter after the other are steps over all at once
    """

    def __init__(self, make: Make) -> None:
        self.make = make
        self.shapes, self.dtype, self.device = SHAPES, torch.float64, "cpu"
        self.whole: list[Tensor] = []
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        for device in devices:
            for shapes in (SHAPES, SHAPES[:1]):
                for dtype in (torch.float64, torch.float32):
                    self._try(shapes, dtype, device)

    def _try(self, shapes: Shapes, dtype: torch.dtype, device: str) -> None:
        if self.ran:
            return
        self.shapes, self.dtype, self.device = shapes, dtype, device
        with suppress(Exception):  # an optimizer of a program may raise anything
            self.whole = self._trained(_same)

    @property
    def ran(self) -> bool:
        return bool(self.whole)

    def works_on_parts(self) -> bool:
        """Whether a rank may hold a part of a parameter."""
        return self._agrees(lambda: self._joined([self._trained(_part(r)) for r in (0, 1)]))

    def works_in_turns(self) -> bool:
        """Whether an engine may step over its parameters unit by unit."""
        return self._agrees(lambda: self._trained(_same, in_turns=True))

    def _agrees(self, other: Callable[[], Sequence[Tensor]]) -> bool:
        try:
            params = other()
        except Exception:  # noqa: BLE001 - whatever it is, it is raised on pieces alone
            return False
        rounding = 1e3 * torch.finfo(self.dtype).eps
        return all(
            torch.allclose(
                one, two, rtol=rounding, atol=rounding * float((one - begun).abs().max())
            )
            for one, two, begun in zip(
                self.whole, params, map(self._begin, self.shapes), strict=True
            )
        )

    def _trained(self, part: Callable[[Tensor], Tensor], *, in_turns: bool = False) -> list[Tensor]:
        """The parameters after the steps."""
        params = [nn.Parameter(part(self._begin(shape)).clone()) for shape in self.shapes]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs too
            optimizer = self.make(params)
            for step in range(STEPS):
                for p, shape in zip(params, self.shapes, strict=True):
                    p.grad = part(self._gradient(shape, step)).clone()
                for together in [[p] for p in params] if in_turns else [params]:
                    step_over(optimizer, [together])
        return [p.detach() for p in params]

    def _begin(self, shape: tuple[int, ...]) -> Tensor:
        return self._random(shape, 0, 1.0, 0.1)

    def _gradient(self, shape: tuple[int, ...], step: int) -> Tensor:
        return self._random(shape, step + 1, 0.3 * (step + 1), 3.0)

    def _random(self, shape: tuple[int, ...], seed: int, first: float, rest: float) -> Tensor:
        """Random numbers, in the two parts times a factor each."""
        made = torch.Generator().manual_seed(10 * seed + len(shape))
        flat = torch.randn(math.prod(shape), generator=made, dtype=torch.float64, device="cpu")
        cut = int(flat.numel() * _CUT)
        flat[:cut] *= first
        flat[cut:] *= rest
        return flat.view(shape).to(self.device, self.dtype)

    def _joined(self, ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        pairs = zip(self.shapes, *ranks, strict=True)
        return [torch.cat([a.flatten(), b.flatten()]).view(shape) for shape, a, b in pairs]


def maker(kind: type[Optimizer], options: Mapping[str, Any]) -> Make:
    """Makes optimizers of a class with the options of one of its groups, except the rate.

    A group's own rate may be 0, at the begin of a warm-up.
    """
    options = {k: v for k, v in options.items() if k not in NAMING}
    options |= {"lr": _RATE} if "lr" in options else {}
    accepted = {k: v for k, v in options.items() if k in inspect.signature(kind).parameters}
    return lambda params: kind([{"params": params, **options}], **accepted)


def _same(x: Tensor) -> Tensor:
    return x


def _part(rank: int) -> Callable[[Tensor], Tensor]:
    """What a rank holds of a parameter: [k, 1, ..., 1]."""

    def piece(x: Tensor) -> Tensor:
        cut = int(x.numel() * _CUT)
        values = x.view(-1)[cut:] if rank else x.view(-1)[:cut]
        return values.view(-1, *[1] * (x.dim() - 1))

    return piece
