"""The protocol of a callback, and the list that calls several of them.

    run_began(run)  (step_ended  [evaluated]  [saved])*  run_ended(error)

A callback is called on rank 0. With `all_ranks = True` it is called on every rank, so that it may
use the engine, whose collectives all ranks join.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from shardwise.core.errors import InputError, RunError, bad, one_line
from shardwise.core.tools.arguments import short_repr

if TYPE_CHECKING:
    from shardwise.comm.world import World
    from shardwise.engine.engine import Engine
    from shardwise.engine.step_end import Metrics

#: What the end of a callback may take. A tracker that waits for its server is then left.
END_S: Final = 60.0
MOMENTS: Final = ("run_began", "step_ended", "evaluated", "saved", "run_ended")


@dataclass(frozen=True)
class RunFacts:
    """What a callback learns when a run begins.

    folder  the folder of the run's files
    config  the settings of the run: nested dictionaries of plain values
    step    the steps that are already done: above 0 if the run is resumed
    rank    of this process, of `ranks`
    engine  the engine, if there is one
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    rank: int = 0
    ranks: int = 1
    engine: "Engine | None" = None


class Callback(Protocol):
    """Called as a run proceeds. Each method does nothing until a class of yours overrides it.

    `metrics` are finite numbers by name: "loss/train", "optimizer/lr". An exception of a callback
    ends the run, and its text names the callback. With `optional = True`, as of the trackers, it is
    printed once and ends nothing, except in `run_began`. After `run_began`, `run_ended` follows in
    any case: `error` is what ended the run, None if it was not an error. An exception of
    `run_ended` is printed and ends nothing. On rank 0 alone, `run_ended` has 60 seconds.
    """

    all_ranks: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    def run_began(self, run: RunFacts) -> None:
        """Called before the first step."""

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step. Steps count from 1, also over resumed runs."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation that follows the step."""

    def saved(self, step: int, path: Path) -> None:
        """Called after the checkpoint `path` was saved."""

    def run_ended(self, error: BaseException | None) -> None:
        """Called after the last step, or after the error that ended the run."""


class Callbacks:
    """Several callbacks, called in order.

    In a loop of your own:

        callbacks = sw.callbacks.Callbacks([sw.callbacks.TensorBoard()], world)
        with callbacks.run("runs/mine", engine=engine, config={"lr": 3e-4}):
            for batch in loader:
                callbacks.step_ended(engine.steps, engine.step(batch))

    Every rank makes the list and calls its methods; the list knows on which rank it is.

    Raises InputError for an object without one of the methods.
    """

    def __init__(self, callbacks: Sequence[Callback], world: "World | None" = None) -> None:
        for each in callbacks:
            _require(each)
        self._rank, self._ranks = (world.rank, world.size) if world else (0, 1)
        self._called = [c for c in callbacks if self._rank == 0 or _on_all_ranks(c)]
        self._failed: list[Callback] = []  # of the optional ones, those that have

    @contextmanager
    def run(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        step: int = 0,
        engine: "Engine | None" = None,
    ) -> Iterator[None]:
        """Call `run_began`, and at the end of the block `run_ended`, whatever ends it."""
        facts = RunFacts(Path(folder), config or {}, step, self._rank, self._ranks, engine)
        began: list[Callback] = []
        try:
            for callback in self._called:
                began.append(callback)
                _call(callback, "run_began", facts)
            yield
        except BaseException as error:
            _end(began, error)
            raise
        _end(began, None)

    def step_ended(self, step: int, metrics: "Metrics | Mapping[str, float | None]") -> None:
        """Call `step_ended` with the metrics of `engine.step`, or with numbers of your own.

        Raises RunError that names a callback that failed, and InputError for what is no number.
        """
        self._tell("step_ended", step, numbers(metrics))

    def evaluated(self, step: int, metrics: "Mapping[str, float | None]") -> None:
        """Call `evaluated`. Raises RunError that names a callback that failed."""
        self._tell("evaluated", step, numbers(metrics))

    def saved(self, step: int, path: Path) -> None:
        """Call `saved`. Raises RunError that names a callback that failed."""
        self._tell("saved", step, path)

    def _tell(self, moment: str, *facts: Any) -> None:
        for callback in self._called:
            try:
                _call(callback, moment, *facts)
            except RunError as error:
                if not getattr(callback, "optional", False):
                    raise
                if callback not in self._failed:
                    self._failed.append(callback)
                    what = str(error).removesuffix(" The run was stopped.")
                    print(f"shardwise: {what} The run goes on.", file=sys.stderr)


def numbers(metrics: "Metrics | Mapping[str, float | None]") -> dict[str, float]:
    """The metrics by name, without those that are None or not finite."""
    if not isinstance(metrics, Mapping):
        metrics = {
            "loss/train": metrics.loss,
            "optimizer/lr": metrics.lr,
            "optimizer/grad_norm": metrics.grad_norm,
            "bytes/step": metrics.bytes,
        }
    known = {name: _number(name, value) for name, value in metrics.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise bad(
            f"the metric {name!r} = {short_repr(value)}",
            "a number, or a tensor of one element",
            f'step_ended(step, {{"{name}": 0.5}})',
        ) from None


def _require(callback: object) -> None:
    missing = [name for name in MOMENTS if not callable(getattr(callback, name, None))]
    if missing or isinstance(callback, type):
        what = "a class" if isinstance(callback, type) else f"without {', '.join(missing)}"
        raise bad(
            f"the callback {short_repr(callback)}, which is {what}",
            f"an object with the methods {', '.join(MOMENTS)}",
            "class Mine(sw.callbacks.Callback): ..., which has them all, and Mine()",
        )


def _on_all_ranks(callback: Callback) -> bool:
    return getattr(callback, "all_ranks", False)


def _call(callback: Callback, moment: str, *facts: Any) -> None:
    try:
        getattr(callback, moment)(*facts)
    except InputError:
        raise
    except Exception as error:
        raise RunError(
            f"The callback {type(callback).__name__} failed in {moment}: {_text(error)}. "
            "The run was stopped."
        ) from error


def _text(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}".removesuffix("."))


def _end(began: Sequence[Callback], error: BaseException | None) -> None:
    """Call `run_ended` of each. Errors are printed: the run is over."""
    for callback in began:
        try:
            if _on_all_ranks(callback):
                callback.run_ended(error)
            else:
                _within(END_S, callback.run_ended, error)
        except Exception as failed:  # noqa: BLE001  the run is over, and the others must end too
            name = type(callback).__name__
            print(
                f"shardwise: the callback {name} failed in run_ended: {_text(failed)}",
                file=sys.stderr,
            )


def _within(
    limit_s: float, act: Callable[[BaseException | None], None], error: BaseException | None
) -> None:
    """Call `act` in a thread that does not keep the process alive. Raises its exception."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            act(error)
        except Exception as failed:  # noqa: BLE001  raised by the thread that waits
            raised.append(failed)

    thread = threading.Thread(target=run, name="end of a callback", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"it did not end within {limit_s:.0f} s, and was left")
    for failed in raised:
        raise failed
