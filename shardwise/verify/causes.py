"""Why a proof fails: properties of a model, its loss or its batches that no plan reproduces.

Each is tried in one process without a plan, and the first that is true is named.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import split
from shardwise.models.trainable import Trainable
from shardwise.verify.finding import Finding
from shardwise.verify.inputs import without_dropout
from shardwise.verify.oracles.batches import SEED
from shardwise.verify.parity import BUILDING, alone_of

#: The rows of the batches that are tried, and the relative difference of equal losses.
ROWS, CLOSE = 4, 1e-5


def cause(trainable: Trainable, findings: Sequence[Finding]) -> str:
    """The property of the model that no plan reproduces; "" if none is found."""
    with BUILDING, torch.random.fork_rng(devices=[]):
        trial = Trial(without_dropout(trainable))
        tried = (drawn(trial), carried(trial), summed(trial))
    return next((text for text in (*tried, of_a_rank(findings)) if text), "")


def of_a_rank(findings: Sequence[Finding]) -> str:
    """Whether ranks compute different losses of one batch in one process."""
    losses = [one.alone[0] for one in findings if one.alone]
    if all(_close(loss, losses[0]) for loss in losses):
        return ""
    return (
        f"The loss of one batch in one process is {losses[0]:.6g} on rank 0, and on another rank "
        f"{next(x for x in losses if not _close(x, losses[0])):.6g}: the model or the loss depends "
        "on the rank. All ranks must compute the same function of their rows."
    )


class Trial:
    """The model in one process in fp64, in training mode, from the same buffers in each call."""

    def __init__(self, trainable: Trainable) -> None:
        oracle = alone_of(trainable, Plan(precision="fp64"), torch.device("cpu")).exact
        self.model, self.task, self.dtype = oracle.model, oracle.task, oracle.dtype
        self.batches = [trainable.batch(ROWS, SEED + 2 * k) for k in range(2)]
        self.start = {name: b.clone() for name, b in self.model.named_buffers()}

    @torch.no_grad()
    def loss(self, batch: Any, seed: int = 0, *, kept: bool = False) -> float:
        """The loss of a batch; the pass begins with the first buffers, unless `kept`."""
        for name, b in () if kept else self.model.named_buffers():
            b.copy_(self.start[name])
        torch.manual_seed(seed)
        return float(self.task.loss_of(self.model, batch, self.dtype))


def drawn(trial: Trial) -> str:
    """Whether a pass draws random numbers, and in which function."""
    batch = trial.batches[0]
    first, other, again = (trial.loss(batch, seed) for seed in (1, 2, 1))
    if first != again:
        return (
            f"The loss of one batch is {first:.6g} and then {again:.6g}, with the same seed of "
            "torch: the model or the loss draws random numbers of another generator, or keeps a "
            "state between calls. A plan cannot draw the same ones."
        )
    if first == other:
        return ""
    with FirstDraw() as draw:
        trial.loss(batch, 1)
    return (
        f"The forward pass draws random numbers ({draw.name or 'of torch'}), and each "
        "rank draws its own, so no plan gives the numbers of one process. Dropout as a module, "
        "nn.Dropout, is set to 0 by the proof; a call of torch.nn.functional.dropout or torch.rand "
        "is not. To prove the rest, make its rate an attribute whose name has `drop` in it, or "
        "switch it off."
    )


class FirstDraw(TorchFunctionMode):
    """`name`: the first function that changes the state of torch's generator."""

    name = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        if not self.name and not torch.equal(before, torch.get_rng_state()):
            self.name = getattr(func, "__name__", str(func))
        return out


def carried(trial: Trial) -> str:
    """A buffer that a pass changes and later passes read."""
    one, other = trial.batches
    plain = trial.loss(other)
    trial.loss(one)
    changed = [n for n, b in trial.model.named_buffers() if not torch.equal(b, trial.start[n])]
    if not changed or trial.loss(other, kept=True) == plain:
        return ""
    return (
        f"A training pass changes the buffer {changed[0]}, and the loss depends on it. A rank has "
        "other rows, or more microbatches, than one process, so its buffer differs. Compute it "
        "from what all ranks have, or sum it over the data ranks (torch.distributed.all_reduce) in "
        "the forward; spectral norm computes it anew in each microbatch."
    )


def summed(trial: Trial) -> str:
    """Whether the loss is no mean over the tokens."""
    tokens: Callable[[Any], int] = trial.task.tokens
    batch = trial.batches[0]
    halves = split(batch, 2, "halves")
    whole, parts = trial.loss(batch), [trial.loss(half) for half in halves]
    mean = sum(tokens(x) * part for x, part in zip(halves, parts, strict=True)) / tokens(batch)
    if _close(whole, mean) or not math.isfinite(whole):
        return ""
    if _close(whole, sum(parts)):
        return (
            f"The loss is a sum over the rows: it is {whole:.6g} for {ROWS} rows, and "
            f"{parts[0]:.6g} and {parts[1]:.6g} for their halves. It must be their mean, as with "
            'reduction="mean".'
        )
    return (
        f"The loss is no mean over the rows: it is {whole:.6g} for {ROWS} rows, and the mean of "
        f"their halves is {mean:.6g}. If rows count differently, as by their number of tokens, "
        "say so with tokens=. If rows are compared with each other, as in a contrastive loss or a "
        "norm over the batch, a plan that divides the batch computes another loss."
    )


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12)
