"""Agreement: before each call of a transport, the ranks compare what they are about to do.

`sw.init(check="each")`, or SHARDWISE_CHECK=each, puts it around every transport of the world:

    rank 0   writes "all_reduce of 4 float32, called by train.py:12"  |        | all_reduce
    rank 1   writes "all_reduce of 4 float32, called by train.py:12"  | reads  | all_reduce
    rank 2   writes "all_gather of 8 float32, called by train.py:14"  |        | InputError on all

The records are in the run's store, so no message of the run is needed to compare them.  A receive
is compared with its send when the receiver waits for it: ranks may begin to receive long before.

A rank that waits for a record looks for a circle: each rank in it waits for a record of the next,
which is not there.  No rank of the circle can go on, so they are all told where each one waits.  A
rank that has left the world closes a circle, too.

Each call costs a few round trips to the store, which is for tests and for the search of a mistake.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from shardwise.comm.gloo.pool import Pool
from shardwise.comm.ledger import Ledger
from shardwise.comm.start.call_stack import place, program_line
from shardwise.comm.transport import Links, Pending, Transport
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import rank_names

#: The name of the environment variable, and its only value.
VARIABLE, EACH = "SHARDWISE_CHECK", "each"
#: The text of a rank that has left the world.
LEFT: Final = "left"
_GLANCE_S, _FIRST_LOOK_S, _LOOK_S = 0.002, 0.3, 0.3

#: For each rank that has shown it: its number of calls, the call in which it waits, and the keys
#: for which it waits, by rank.
States = dict[int, tuple[int, str, dict[str, str]]]


@dataclass(frozen=True)
class CallRecord:
    """What one rank is about to do.

    `detail` must be equal on all ranks, as `line`, the line of the program. `out` and `into` are
    the elements that it receives from and sends to each rank of an all-to-all.
    """

    kind: str
    axis: str
    detail: str
    line: str = ""
    place: str = ""
    out: Sequence[int] = ()
    into: Sequence[int] = ()

    def __str__(self) -> str:
        counts = f", receives {[*self.out]}, sends {[*self.into]}" if self.out else ""
        return f"{self.kind} of {self.detail}{counts} on axis {self.axis}, called by {self.place}"


class Agreement:
    """The records of one rank, and what it reads of the others."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = PrefixStore("shardwise/agreement", store), rank, size
        self.calls = self.opened = 0

    def meet(self, key: str, ranks: Sequence[int], call: CallRecord) -> None:
        """Write `call` under `key`, and read those of `ranks`, of which this is one.

        Raises:
            InputError: the ranks are about to do different things, or none of them can go on.
        """
        keys = [f"{key}/{rank}" for rank in ranks]
        self.write(keys[list(ranks).index(self.rank)], call)
        found = self._read(dict(zip(ranks, keys, strict=True)), call)
        if not _agree(found):
            raise self._disagreed(dict(zip(ranks, map(str, found), strict=True)))

    def write(self, key: str, call: CallRecord) -> None:
        """Write `call`, for other ranks to read."""
        self.calls += 1
        self.store.set(key, json.dumps(asdict(call)))

    def forget(self, key: str) -> None:
        """Remove a record that all its readers have read."""
        self.store.delete_key(key)

    def expect(self, key: str, source: int, call: CallRecord) -> None:
        """Wait for what `source` is about to send, and compare it with the receive `call`.

        Raises:
            InputError: they are not the same, or `source` cannot go on before this rank does.
        """
        (sent,) = self._read({source: key}, call)
        self.forget(key)
        if (sent.detail, sent.axis) != (call.detail, call.axis):
            raise self._disagreed({source: str(sent), self.rank: str(call)})

    def leave(self) -> None:
        """This rank makes no more calls."""
        with suppress(RuntimeError):  # the store may have gone first
            self.store.set(f"at/{self.rank}", json.dumps([self.calls, LEFT, {}]))

    def _read(self, keys: dict[int, str], call: CallRecord) -> list[CallRecord]:
        begun, shown, pause = time.monotonic(), False, _GLANCE_S
        while not self.store.check(list(keys.values())):
            if self.store.check(["disagreed"]):
                raise InputError(self.store.get("disagreed").decode())
            if time.monotonic() - begun > _FIRST_LOOK_S:
                if not shown:
                    self._show(str(call), keys)
                shown, pause = True, _LOOK_S
                self._look()
            time.sleep(pause)
        if shown:
            self._show("", {})
        return [CallRecord(**json.loads(self.store.get(key))) for key in keys.values()]

    def _show(self, what: str, keys: dict[int, str]) -> None:
        """Let the others see in which call this rank waits, and for which keys of which ranks."""
        self.store.set(f"at/{self.rank}", json.dumps([self.calls, what, keys]))

    def _look(self) -> None:
        """Raise InputError if this rank waits, perhaps by way of others, for one that waits for it.

        All states are read twice, and the keys in between: in a circle whose states have not
        changed, each rank waited all the time for a key that nobody has written.
        """
        before = self._states()
        path = set(_circle(before, [self.rank], self._is_missing))
        after = self._states() if path else {}
        if path and all(after.get(rank) == before[rank] for rank in path):
            raise self._disagreed({rank: before[rank][1] for rank in sorted(path)})

    def _states(self) -> States:
        keys = {rank: f"at/{rank}" for rank in range(self.size)}
        return {
            rank: tuple(json.loads(self.store.get(key)))
            for rank, key in keys.items()
            if self.store.check([key])
        }

    def _is_missing(self, key: str) -> bool:
        return not self.store.check([key])

    def _disagreed(self, calls: dict[int, str]) -> InputError:
        """The error that all ranks raise: that of the first rank which has found a disagreement."""
        named = dict.fromkeys(calls.values())
        texts = [
            f"{rank_names([rank for rank in calls if calls[rank] == text])} "
            + ("has left the world" if text == LEFT else f"in {text}")
            for text in named
        ]
        error = bad(
            f"ranks that do different things at once: {'; '.join(texts)}",
            "the same calls in one order on all ranks of an axis, with equal shapes and dtypes",
            "such a call outside of branches on the rank, or on data of the rank alone",
        )
        return InputError(self.store.compare_set("disagreed", "", str(error)).decode())


def _agree(calls: Sequence[CallRecord]) -> bool:
    first = calls[0]
    facts = {(call.kind, call.axis, call.detail, call.line) for call in calls}
    pairs = ((a, b) for a in range(len(calls)) for b in range(len(calls)) if first.out)
    return len(facts) == 1 and all(calls[a].into[b] == calls[b].out[a] for a, b in pairs)


def _circle(states: States, path: list[int], missing: Callable[[str], bool]) -> list[int]:
    """`path`, and ranks that each wait for the next: to one that is in the list, or has left."""
    _, what, keys = states.get(path[-1], (0, "", {}))
    if what == LEFT or path[-1] in path[:-1]:
        return path
    onward = (int(rank) for rank, key in keys.items() if missing(key))
    return next(
        (found for rank in onward if (found := _circle(states, [*path, rank], missing))), []
    )


class Agreeing(Transport):
    """A transport whose ranks agree before each call of `inner`."""

    def __init__(
        self, inner: Transport, agreement: Agreement, line: Sequence[int], opened: str
    ) -> None:
        self.inner, self.agreement, self.line, self.opened = inner, agreement, line, opened
        self.rank, self.size, self.answered = inner.rank, inner.size, inner.answered
        self.numbers = itertools.count()
        self.messages = dict[tuple[int, int], int]()

    def with_ledger(
        self, axis: str, ledger: Ledger, device: torch.device, pool: Pool | None = None
    ) -> "Agreeing":
        """The same group of ranks, with one numbering of its calls."""
        one = super().with_ledger(axis, ledger, device, pool)
        one.inner = self.inner.with_ledger(axis, ledger, device, one.pool)
        return one

    def _meet(self, kind: str, x: Tensor | None, detail: str = "", **counts: Any) -> None:
        """Agree on the next call of the whole line, which works on `x`."""
        number = next(self.numbers)
        call = self._call(kind, x, detail, **counts)
        self.agreement.meet(f"{self.opened}/{number}", self.line, call)
        self.agreement.forget(f"{self.opened}/{number - 1}/{self.agreement.rank}")

    def _call(self, kind: str, x: Tensor | None, detail: str = "", **counts: Any) -> CallRecord:
        what = [] if x is None else [f"a tensor of {[*x.shape]} {str(x.dtype)[6:]}"]
        text = ", ".join([*what, *([detail] if detail else [])])
        return CallRecord(kind, self.axis, text, program_line(), place(), **counts)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        self._meet("all_reduce", x, op)
        return self.inner.all_reduce(x, op)

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        self._meet("broadcast", x, f"root {root}")
        return self.inner.broadcast(x, root)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self._meet("all_gather", x)
        return self.inner.all_gather(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self._meet("reduce_scatter", x)
        return self.inner.reduce_scatter(out, x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """The counts are compared pair by pair."""
        detail = f"{str(x.dtype)[6:]} elements"
        self._meet("all_to_all", None, detail, out=tuple(out_counts), into=tuple(in_counts))
        return self.inner.all_to_all(out, x, out_counts, in_counts)

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        self.agreement.write(self._message(self.rank, to), self._call("send", x))
        return self.inner.send(x, to)

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        """The wait for the message waits for the record of its send first."""
        key, call = self._message(source, self.rank), self._call("receive", x)
        arriving = self.inner.receive(x, source)
        compare = partial(self.agreement.expect, key, self.line[source], call)
        return Pending([compare, arriving.wait])

    def _message(self, source: int, to: int) -> str:
        """The key of the next message from `source` to `to`."""
        number = self.messages.get((source, to), 0)
        self.messages[source, to] = number + 1
        return f"{self.opened}/{source}-{to}/{number}"

    def barrier(self) -> None:
        self._meet("barrier", None)
        self.inner.barrier()

    def ready(self) -> None:
        self.inner.ready()

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        self._meet("all_gather", x, f"dim {dim}")
        return self.inner.all_gather_along(x, dim)

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        self._meet("reduce_scatter", x, f"dim {dim}")
        return self.inner.reduce_scatter_along(x, dim)

    def begin_reduce_scatter_along(self, x: Tensor, dim: int) -> Pending[Tensor]:
        self._meet("reduce_scatter", x, f"dim {dim}")
        return self.inner.begin_reduce_scatter_along(x, dim)


class AgreeingLinks(Links):
    """Links whose transports agree before each call, and whose ranks agree on what they open."""

    def __init__(self, inner: Links, agreement: Agreement) -> None:
        self.inner, self.agreement = inner, agreement

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """The inner transport, with agreement; a line of one rank needs none."""
        opened = self._meet("open", axis, lines, queue)
        inner = self.inner.transport(axis, lines, rank, queue)
        if inner.size == 1:
            return inner
        line = next(line for line in lines if rank in line)
        return Agreeing(inner, self.agreement, line, f"{opened}/{line[0]}")

    def release(self, lines: Sequence[Sequence[int]], queue: str = "now") -> None:
        self._meet("close", "", lines, queue)
        self.inner.release(lines, queue)

    def _meet(self, kind: str, axis: str, lines: Sequence[Sequence[int]], queue: str) -> str:
        one, self.agreement.opened = self.agreement, self.agreement.opened + 1
        detail = f"groups of ranks {[[*line] for line in lines]} ({queue})"
        key = f"open/{one.opened}"
        one.meet(key, range(one.size), CallRecord(kind, axis, detail, program_line(), place()))
        one.forget(f"open/{one.opened - 1}/{one.rank}")
        return key

    def close(self) -> None:
        self.agreement.leave()
        self.inner.close()

    @property
    def root(self) -> Links:
        return self.inner.root


def agreement_wanted(check: str | None) -> bool:
    """Whether `check`, or if it is None the environment, asks for agreement.

    Raises:
        InputError: another word than "each".
    """
    asked = os.environ.get(VARIABLE, "") if check is None else check
    if asked not in ("", EACH):
        given, instead = f"check={check!r}", f"check='{EACH}'"
        if check is None:
            given, instead = f"{VARIABLE}='{asked}' in the environment", f"{VARIABLE}={EACH}"
        raise bad(given, f"'{EACH}', or nothing", instead)
    return asked == EACH
