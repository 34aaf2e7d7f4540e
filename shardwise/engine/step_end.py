"""The end of a step: its numbers on their way to the host, what they decide, and its metrics.

    the device        gradients, loss, tokens, norm --> factor, skips --> the update
    the host          issues all of it;  reads the numbers of step n at the end of step n + 1

On the CPU numbers are there at once, and a step reports its own.  Where torch's optimizer cannot
skip an update by a number on the device, and in fp16, the host reads them before the update.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardwise.agreement.same_on_ranks import SameOnRanks
from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.core.errors import NonFiniteError
from shardwise.engine.checks import validate
from shardwise.engine.optimizer.norm import counted
from shardwise.engine.optimizer.optimizer import Factor
from shardwise.techniques.data.consensus import used_in
from shardwise.techniques.data.units import Unit

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


@dataclass(frozen=True)
class StepResult:
    """What the ranks agreed on at the end of a step; `norm` is None unless it was needed."""

    loss: float
    tokens: float
    norm: float | None
    skipped: bool
    correction: float  # the factor of the gradients without clipping
    used: Sequence[float]
    differs: float


class StepNumbers(NamedTuple):
    """What the ranks know at the end of a step: doubles on the device, [1] but for `used`.

    correction     what an update multiplies gradients by, without clipping
    loss, tokens   the sums over the ranks
    used           the sum of `summary` of consensus.py
    squares        the sum of squares of the gradients, for their norm; 0 if it is not needed
    differs        not 0 if ranks that must have the same have not
    """

    correction: Tensor
    loss: Tensor
    tokens: Tensor
    used: Tensor
    squares: Tensor
    differs: Tensor


class Progress(NamedTuple):
    """What the next step of an engine sends depends on: the steps of the run, of this engine, and
    those that were not skipped; whether data ranks have compared a batch, and an update is pending.
    """

    steps: int
    steps_run: int
    checked: int
    compared: bool
    pending: bool

    @classmethod
    def of(cls, engine: "Engine") -> "Progress":
        counts = engine.steps, engine.steps_run, engine.consistency.checked
        return cls(*counts, engine.shares_compared, bool(engine.optimizer.host.running))

    def give_to(self, dry: "Engine") -> None:
        """Set these numbers of an engine, perhaps after its pending update."""
        if dry.optimizer.host.running and not self.pending:
            dry.flush()
        dry.steps, dry.steps_run, dry.consistency.checked = self[:3]
        dry.shares_compared = self.compared


class PendingResult:
    """The numbers of a step on their way to the host, with what is needed to report them."""

    def __init__(
        self, step: int, numbers: StepNumbers, same: SameOnRanks, *, by_norm: bool, raises: bool
    ) -> None:
        self.step, self.by_norm, self.raises = step, by_norm, raises
        self.numbers = HostNumbers(torch.cat(numbers))
        self.same: SameOnRanks | None = copy(same)  # until it is reported
        same.forget_batch()  # which holds tensors
        self.found: StepResult | None = None

    def read(self) -> StepResult:
        """Wait for the numbers."""
        if self.found is None:
            correction, loss, tokens, *used, squared, differs = self.numbers.read()
            tokens = counted(tokens)
            loss, norm = loss / (tokens or 1), math.sqrt(squared) * correction
            skipped = not (math.isfinite(loss) and math.isfinite(norm))
            shown = norm if self.by_norm else None
            self.found = StepResult(loss, tokens, shown, skipped, correction, used, differs)
        return self.found

    def checked(self) -> StepResult:
        """The result. Raises NonFiniteError if the step was not updated and should have been."""
        if self.read().skipped and self.raises:
            raise _not_finite(self.step, self.read())
        return self.read()


class Metrics:
    """The metrics of one step.  On a GPU, reading one waits for the gradients of the step.

    loss       the mean over the tokens of the global batch
    tokens     their number
    grad_norm  the norm of the gradient before clipping; None without clipping
    skipped    no update was made: fp16 overflowed, or the loss or a gradient was not finite
    lr         the learning rate
    bytes      the bytes that this rank sent

    Raises NonFiniteError for a loss or gradient that is not finite, unless such steps are skipped.
    """

    def __init__(
        self, result: PendingResult | StepResult, lr: float, sent_bytes: int, *, clips: bool
    ) -> None:
        self._result, self._clips = result, clips
        self.lr, self.bytes = lr, sent_bytes

    def _read(self) -> StepResult:
        if isinstance(self._result, PendingResult):
            self._result = self._result.checked()
        return self._result

    @property
    def loss(self) -> float:
        return self._read().loss

    @property
    def tokens(self) -> float:
        return self._read().tokens

    @property
    def grad_norm(self) -> float | None:
        found = self._read()
        return found.norm if self._clips and not found.skipped else None

    @property
    def skipped(self) -> bool:
        return self._read().skipped

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_result": self._read()}

    def _values(self) -> dict[str, Any]:
        names = "loss", "tokens", "grad_norm", "skipped", "lr", "bytes"
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(tuple(self._values().values()))

    def __repr__(self) -> str:
        return (
            f"Metrics({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"
        )


# --- from the gradients to the update -------------------------------------------------------------


def squares(engine: "Engine", number: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares of all ranks' gradients [1], loss scale included: a double.

    The sum of `number` [1] over the tensor axis travels in the same message.
    """
    optimizer, guard = engine.optimizer, engine.guard
    with engine.ledger.phase("backward"):
        engine.data.finish_sums()
    with engine.ledger.phase("check"):
        found, device = list[Tensor](), engine.world.device
        for flats, axes in engine.sharded.norms:
            own = [each.to(device) for each in optimizer.squares(flats)]
            squared = torch.stack(own).sum().view(1) if own else number.new_zeros(1)
            for axis in axes:
                beside = number if axis is guard.axis else number[:0]
                total = begin_sum(torch.cat([squared, beside]), axis).wait()
                squared, number = total[:1], total[1:] if len(beside) else number
            found.append(squared)
        return begin_sum(torch.stack(found).sum(0), engine.stages).wait(), number


def shrink(clip: float | None, norm: Any) -> Any:
    """The factor that bounds gradients of this norm (Pascanu et al., arXiv 1211.5063)."""
    if clip is None or norm is None:
        return 1.0
    ratio = clip / (norm + 1e-6)
    whole = isinstance(ratio, Tensor)
    return ratio.nan_to_num(1.0).clamp(max=1.0) if whole else min(1.0, ratio)


def factor_without_wait(
    engine: "Engine", unread: PendingResult, numbers: StepNumbers, alone: float | None
) -> Factor:
    """The factor of an update, from numbers of a step that the device may not have made yet.

    `alone` is the number of microbatches if no other rank computes tokens.
    """
    flags = engine.consensus.flags()
    if not all(flags):  # of which other ranks may have a gradient
        flags = used_in(unread.read().used)
    engine.consensus.set_used(flags)
    finite = torch.cat([numbers.loss, numbers.squares]).isfinite().all()
    # without dims: factors change no dtype
    correction = numbers.correction.squeeze() if alone is None else 1 / alone
    norm = numbers.squares.squeeze().sqrt() * correction if unread.by_norm else None
    value = shrink(engine.options.clip, norm) * correction
    return Factor(value, finite.logical_not().float())


def update_or_skip(
    engine: "Engine", unread: PendingResult, summed: Tensor, arriving: Iterable[Unit]
) -> None:
    """Update after the host has read the numbers of the step; `summed` is this rank's loss."""
    result, offload = _checked_result(engine, unread), engine.plan.offloaded
    if result.skipped:
        _leave_out(engine, unread.step, summed, _norm_of(result))
        return
    if engine.passes.stale is None:  # else the schedule has updated each stage
        factor = Factor(shrink(engine.options.clip, result.norm) * result.correction)
        later = offload is not None and offload.delays(engine.steps)
        engine.optimizer.update(factor, None if unread.by_norm else arriving, later=later)
    engine.scale.update(overflow=False)
    engine.guard.passed()


def _leave_out(engine: "Engine", step: int, summed: Tensor, norm: float | None) -> None:
    """End a step without its update. Raises NonFiniteError if it must not be skipped.

    `summed` is this rank's loss; `norm` is the norm of the gradients if that is the reason.
    All ranks call this, and all raise or none.
    """
    optimizer, guard, data = engine.optimizer, engine.guard, engine.data
    with engine.ledger.phase("backward"):
        data.finish_sums()
    if engine.passes.stale is None:
        data.units.to_sharded()
    optimizer.host.finish()
    find = partial(guard.error, step, summed, optimizer.flats, norm)
    error = guard.record_skip(step, find, expected=engine.scale.on)
    engine.scale.update(overflow=True)
    optimizer.skip()
    if error is not None:
        if not engine.passes.leave_out():  # the step has changed nothing
            data.units.begin_unshard()
            data.in_step = False
        raise error


def report(engine: "Engine", summed: Tensor | None = None) -> None:
    """Read the numbers of the last step, if it has not; raise on all ranks what is wrong with it.
    `summed` is its loss, while its gradients are there.
    """
    unread, engine.unread = engine.unread, None
    if unread is None:
        return
    result, guard = _checked_result(engine, unread), engine.guard
    note_factor(engine, unread)
    if not result.skipped:
        guard.passed()
        return
    find = partial(_not_finite, unread.step, result)
    if summed is not None:
        flats = engine.optimizer.flats
        find = partial(guard.error, unread.step, summed, flats, _norm_of(result))
    error = guard.record_skip(unread.step, find, expected=False)
    if error is not None:
        engine.data.in_step &= summed is None  # else nothing has changed
        engine.weights = None
        raise error


def note_factor(engine: "Engine", unread: PendingResult | None) -> None:
    if unread is not None and not unread.read().skipped:
        result = unread.read()
        engine.optimizer.factor = result.correction * shrink(engine.options.clip, result.norm)


def _checked_result(engine: "Engine", unread: PendingResult) -> StepResult:
    """The numbers of a step. Raises InputError on all ranks for what differs between them."""
    result, same = unread.read(), unread.same
    unread.same = None
    assert same is not None
    engine.consensus.apply(result.used, result.differs, same)
    if result.tokens and not engine.passes.trains and not any(used_in(result.used)):
        raise validate.no_gradient("a step")
    return result


def _norm_of(result: StepResult) -> float | None:
    return result.norm if math.isfinite(result.loss) else None


def _not_finite(step: int, result: StepResult) -> NonFiniteError:
    norm = _norm_of(result)
    what = "the loss or a gradient is" if norm is None else f"the gradient's norm is {norm},"
    return NonFiniteError(f"Step {step}: {what} not finite. It was not used in any update")
