"""The recorder of what a rank issues in a step of a dry run (prediction/time/issued.py).

kernels     the operations of forward and backward passes, on tensors of the model's device
messages    of transports that only count (comm/fake.py), and copies between tiers
            (comm/tiers/tiers.py); what these compute to give a result is no kernel
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from shardwise.comm.fake import FakeLinks
from shardwise.comm.transport import Pending
from shardwise.core.tally import Key
from shardwise.engine.engine import Engine
from shardwise.observe.meta_results import known_by
from shardwise.observe.work import call_tensors, in_backward, moves_nothing, operation_of
from shardwise.prediction.time.issued import Begun, Issued, Operation, Waited
from shardwise.techniques.recompute.checkpointed import computes_again

#: The phases whose kernels are recorded: the update's cost follows from the states.
PASSES: Final = ("forward", "backward")


class Issues:
    """What `engine` issues while it is `recording`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.found = engine, list[Issued]()
        self.known = dict[Any, Operation | None]()
        self.begun, self.hidden = 0, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, messages and copies are recorded; operations by who sees them (step_bytes.py)."""
        world = self.engine.world
        links = world.links.root
        assert isinstance(links, FakeLinks)
        links.issue = world.tiers.issue = self.message
        try:
            yield
        finally:
            links.issue = world.tiers.issue = None

    def message(
        self, axis: str, kind: str, sent_bytes: int, act: Callable[[], Any]
    ) -> Pending[Any]:
        """A message or a copy begins; `act` gives its result."""
        before, self.hidden = self.hidden, True
        act()
        self.hidden = before
        number = self.begun = self.begun + 1
        self.found.append(Begun(number, Key(axis, kind, self.engine.ledger.now), sent_bytes))
        return Pending([lambda: self.found.append(Waited(number))])

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operation below autograd."""
        if moves_nothing(func) or self.hidden or self.engine.ledger.now not in PASSES:
            return
        key = known_by(func, args, kwargs)
        if key is None or key not in self.known:
            here = not self.engine.world.meta or any(x.is_meta for x in call_tensors((args, out)))
            self.known[key] = operation_of(func, args, kwargs, out) if here else None
        if (found := self.known[key]) is not None:
            backward = in_backward()
            again = backward and computes_again()
            self.found.append(found._replace(backward=backward, again=again))
