"""Numbers that the data ranks sum in each step: used parameters, and a checksum.

    1 or 0 for each trained parameter: whether this rank had a gradient for it
    checksum + MARKS ranks d          with d of same_on_ranks.py, whose sum is 0 if ranks agree

A parameter is updated on all ranks if it had a gradient on any rank.

The checksum is of the number of steps and of the units that the rank gathered, in order. If ranks
gather units in different orders, they compute with the wrong weights and no shape error is raised;
a rank that continues after its own error is a step ahead. Only this checksum detects it.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.agreement.checksum import share_numbers
from shardwise.agreement.doubts import operations_of_pass
from shardwise.agreement.same_on_ranks import SameOnRanks
from shardwise.comm.move import begin_sum
from shardwise.comm.tiers.host_memory import HostNumbers, doubles_on
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.tools.tree import leaves
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.buffers import Buffers
from shardwise.techniques.data.outputs import Scaling, Scalings

#: Checksums are below it.
MARKS = 4096
#: Whole numbers up to this one, and their sums, are exact in doubles.
_EXACT = 2**53


class Consensus:
    """The numbers that the data ranks of one model sum in each step.

    In the user's own loop, a step on a GPU does not wait for them: `begin` sums them, and `check`
    reads them when the next backward pass begins, or weights are evaluated or saved. A rank that
    has a gradient for every parameter need not know more; another one waits in `end`.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        flats: Collection[Flat],
        buffers: Buffers,
        device: torch.device,
        modules: Mapping[str, nn.Module] | None = None,
        number: int = 0,
    ) -> None:
        """`number` counts the engines and wrapped modules that the program made."""
        self.axes, self.buffers, self.device = list(axes), buffers, device
        self.trained = [flat for flat in flats if flat.trained]
        self.ranks = math.prod(axis.size for axis in self.axes)
        # odd: a power of two would leave out the high bits of what is hashed
        hashes = min(2**20, _EXACT // (8 * MARKS * self.ranks**2)) - 1
        self.same = SameOnRanks(self.axes, list(flats), hashes, device, modules)
        self.number = number
        self.differs = False  # whether the ranks have found so, and must exchange what they have
        self.rounds = self.passes = self.gathered = self.mark = 0
        #: of the first forward pass of a loop: a checksum of its inputs, and the square
        self.share = doubles_on([0, 0], device)
        #: the sums of a step, on their way to the host
        self.unread: tuple[HostNumbers, Scalings] | None = None

    def gathers(self, unit: int) -> None:
        self.gathered = (31 * self.gathered + unit + 1) % MARKS

    def summary(self) -> Tensor:
        """1 or 0 for each trained parameter with a gradient on this rank; then the checksum."""
        self.same.facts["the place of this module in the order of wrapping"] = self.number
        difference = self.same.difference(self.rounds)
        self.rounds += 1
        self.mark, self.gathered = (self.gathered + 7 * self.rounds) % MARKS, 0
        on_device = isinstance(difference, Tensor)
        last = self.mark + (0 if on_device else MARKS * self.ranks * difference)
        numbers = doubles_on([*self.flags(), last], self.device)
        if on_device:
            numbers[-1] += MARKS * self.ranks * difference.to(self.device)
        return numbers

    def flags(self) -> list[bool]:
        return [flag for group in self.trained for flag in group.grads.has_grad]

    def expected(self) -> Tensor:
        """The flags of a rank without rows in a dry run: those of the step before, or all."""
        last = [float(used) for group in self.trained for used in group.grads.used]
        return doubles_on(last if any(last) else [1.0] * len(last), self.device)

    def begin(self, scalings: Scalings) -> None:
        """Begin to sum the summary of a backward pass, and what `scalings` add."""
        if self.ranks > 1:  # as many numbers in each step: a rank may be a step ahead
            own = torch.cat([self.summary(), self.share])
            for scaling in scalings:
                own = scaling.joined(own)
            self.share = torch.zeros_like(self.share)
            self.unread = HostNumbers(self.begin_agree(own).wait()), scalings
        self.same.doubts.passes = 0

    def end(self) -> None:
        """Set which parameters have a gradient on any rank; waits if this rank lacks one."""
        flags = self.flags()
        self.set_used(flags)
        if self.unread is not None and (self.unread[0].ready or not all(flags)):
            self.check(all_ranks=self.unread[0].ready)

    def check(self, *, all_ranks: bool = True) -> None:
        """Read the sums that `begin` began, unless they have been read. `all_ranks`: whether all of
        them read here, so that they can exchange what differs. Raises InputError if the checksums
        of the ranks differ.
        """
        unread, self.unread = self.unread, None
        if unread is not None:
            numbers = unread[0].read()
            for scaling in reversed(unread[1]):
                numbers = scaling.compared(numbers)
            *found, total, squares = numbers
            if not self.same.data_rank():
                self._warn_of_equal_shares(total, squares, "world.size, world.rank")
            self._take(found)
        if self.differs and all_ranks:
            self.differs = False
            self.same.require()

    def agree_on_shares(self, batch: Any, numbers: Sequence[float], *, warns: bool) -> list[float]:
        """The sums of `numbers`, the first of which are tokens, over the data ranks. `warns`: print
        a line if all have the same rows.
        """
        own = [doubles_on(numbers, self.device), share_numbers(batch, self.device)]
        *summed, total, squares = self.agree(torch.cat(own)).tolist()
        if warns and summed[0]:
            self._warn_of_equal_shares(total, squares, "engine.data_ranks, engine.data_rank")
        return summed

    def _warn_of_equal_shares(self, total: float, squares: float, ranks: str) -> None:
        """Print a line if all data ranks have the same rows, by the sums of `share_numbers`."""
        if total and self.ranks > 1 and self.ranks * squares == total**2:
            part = "::".join(ranks.split(", ")[::-1])
            print(
                f"shardwise: all {self.ranks} data ranks have the same rows in the first step, so "
                "that they compute the same gradient. Give each its own share: "
                f"DistributedSampler(dataset, {ranks}), or batch[{part}].",
                file=sys.stderr,
            )

    def see_loss(self) -> None:
        """A backward pass of a loop begins; in some steps ranks compare its operations."""
        same, doubts = self.same, self.same.doubts
        doubts.passes += 1
        if self.ranks > 1 and same.every and not (self.rounds % same.every or doubts.graph):
            doubts.graph = operations_of_pass()

    def see_inputs(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """A forward pass of a loop begins; ranks compare the inputs of the first one."""
        self.same.note_autocast()
        (args, kwargs), arguments = inputs, self.same.doubts.arguments
        arguments += leaves(inputs, float)
        arguments += [x for x in (*args, *kwargs.values()) if isinstance(x, int | str)]
        if not (self.passes or self.ranks == 1 or torch._C._are_functorch_transforms_active()):
            self.share = share_numbers(inputs, self.device)
        self.passes += 1

    def begin_agree(self, x: Tensor) -> Pending[Tensor]:
        """Begin to sum a small vector over all data ranks."""
        first, *others = [axis for axis in self.axes if axis.size > 1] or self.axes[:1]
        arriving, phase = begin_sum(x, first), first.ledger.now

        def total() -> Tensor:
            x = arriving.wait()
            with first.ledger.phase(phase):  # whatever it is when they are waited for
                for axis in others:
                    x = begin_sum(x, axis).wait()
            return x

        return Pending([total])

    def agree(self, x: Tensor) -> Tensor:
        return self.begin_agree(x).wait()

    def meet(self, scaling: Scaling | None = None) -> None:
        """All ranks ask for the state: compare what they have now, and what `scaling` adds."""
        self.check()
        self.same.forget_batch()
        self.same.facts["the number of steps"] = self.rounds
        if not any(axis.transport.answered for axis in (*self.axes, *self.same.others)):
            return
        own = doubles_on([0], self.device) + self.same.difference(0, modes=False)
        with self.axes[0].ledger.phase("check"):
            summed = self.agree(own if scaling is None else scaling.joined(own))
            if scaling is not None:
                summed = doubles_on(scaling.compared(summed.tolist()), self.device)
            differs = self._on_all(summed)
            for axis in self.same.others:
                differs = begin_sum(differs, axis).wait()
            if number := differs.item():
                self.same.require(on_all=number % 1 != 0)

    def differing(self, summed: Tensor) -> Tensor:
        """A number [1], from the sum of `summary`; its sum over other axes is 0 if all agree."""
        return self._on_all((summed[-1:] / (MARKS * self.ranks)).floor())

    def _on_all(self, difference: Tensor) -> Tensor:
        """The number to sum over the other axes, from the sum over the data ranks."""
        return difference.abs().clamp(max=1) / MARKS + self.same.difference_on_others()

    def apply(self, summed: Sequence[float], differs: float, same: SameOnRanks) -> None:
        """Take the sum of `summary` over the ranks: which parameters have a gradient on any rank.

        `differs` is 0 on all ranks of the model if they have the same, else on none; NaN says
        nothing. `same` is a copy of what the ranks had then. Called by all ranks; raises InputError
        if their checksums differ.
        """
        self._take(summed)
        self.differs = False
        if differs != 0 and not math.isnan(differs):
            same.require(on_all=differs % 1 != 0)
            self.same.floats = same.floats

    def _take(self, summed: Sequence[float]) -> None:
        difference, marks = divmod(int(summed[-1]), MARKS * self.ranks)
        self.differs = difference != 0
        if marks != self.mark * self.ranks:
            raise bad(
                "a step in which data ranks differ: in the units that they gathered, in their "
                "order, or in the number of steps so far",
                "the same steps on all ranks, and under zero3 and FSDP the same modules in the "
                "same order",
                "zero2 (SHARD_GRAD_OP) for modules that some ranks skip; no step after an error "
                "of one rank",
            )
        self.set_used(used_in(summed))

    def set_used(self, flags: Sequence[bool]) -> None:
        each = iter(flags)
        for group in self.trained:
            group.grads.used = [*islice(each, len(group.params))]

    def phase(self, name: str) -> None:
        for axis in self.axes:
            axis.ledger.now = name


def used_in(summed: Sequence[float]) -> list[bool]:
    """Which trained parameters have a gradient on any rank, by the sum of `summary`."""
    return [ranks > 0 for ranks in summed[:-1]]
