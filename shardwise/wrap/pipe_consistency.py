"""What the ranks of `sw.Pipe` must have in common, which they compare now and then.

    the options of the optimizers of their stages, and the batch
    the gradient of the output, by its norm: all compute the same loss
    the factor by which the program scaled its gradients (techniques/data/outputs.py)

A call sends nothing that all ranks sum, so the second call of every EVERY that trains sums numbers
(agreement/same_on_ranks.py), and so does a save.  On a GPU the next call reads them, which
waits for nothing.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.agreement import same_on_ranks
from shardwise.agreement.same_on_ranks import SameOnRanks
from shardwise.comm.move import begin_sum, broadcast
from shardwise.comm.parameter import parameter_like
from shardwise.comm.tiers.host_memory import HostNumbers, doubles_on
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.tools.hook import weakly
from shardwise.techniques.data.outputs import Scaling
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.wrap.plain_optimizer import options_of, require_gradients

_HASHES: Final = 2**20


class PipeConsistency:
    """The options, batches and output gradients of this rank, and when ranks compare them."""

    def __init__(self, params: Iterable[nn.Parameter], axis: Axis, device: torch.device) -> None:
        self.axis, self.device, self.calls = axis, device, 0
        trained = [p for p in params if p.requires_grad]
        self.trained = set(map(id, trained))
        nowhere = Axis("none")
        self.same = SameOnRanks((nowhere, nowhere), (), _HASHES, device)
        self.same.others, self.same.options = [axis], {} if self.trained else None
        self.norm = doubles_on([0], device)
        gradients = [partial(_dense_gradient, p) for p in trained]
        self.scaling = Scaling(gradients, [p.dtype for p in trained])
        self.unread: HostNumbers | None = None
        self.computes_loss = False  # after a call that trains, until its backward pass
        handle = register_optimizer_step_pre_hook(weakly(self.record))
        self.remove = finalize(self, handle.remove)

    def record(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook before every optimizer step."""
        groups = optimizer.param_groups
        if any(id(p) in self.trained for group in groups for p in group["params"]):
            if isinstance(optimizer, LBFGS) and self.axis.size > 1:
                raise bad(
                    "a step of LBFGS under sw.Pipe, over the parameters of one rank's stages",
                    "optimizers that update each parameter alone",
                    "torch.optim.AdamW(module.parameters()), or LBFGS with sw.DDP(module)",
                )
            self.same.stepped(type(optimizer).__name__, options_of(optimizer))
            self.scaling.look()
            if self.computes_loss:
                require_gradients(optimizer)

    def note(self, grads: Sequence[Tensor | None]) -> None:
        """A backward pass has ended, which began with these gradients of the output."""
        if self.calls % same_on_ranks.EVERY == 1:
            self.scaling.note()
            floats = [x for x in grads if x is not None and x.is_floating_point()]
            norms = [torch.linalg.vector_norm(x).double().view(1) for x in floats]
            self.norm = torch.linalg.vector_norm(torch.cat([self.norm.new_zeros(1), *norms])).view(
                1
            )

    def compare(self, batch: Any) -> None:
        """A call that trains begins, on all ranks.  Raises InputError on all if they differ."""
        self.computes_loss = True
        if not self.calls:
            self.same.require_batch(batch)
        if self.calls % same_on_ranks.EVERY == 1:
            self._begin(batch)
        due = self.unread is not None and (
            self.unread.ready or self.calls % same_on_ranks.EVERY != 1
        )
        self.calls += 1
        if self.unread is not None and due:
            numbers, self.unread = self.unread.read(), None
            *_, differs, norm, squares = self.scaling.compared(numbers)
            if differs:
                self.same.require()
            self.same.forget_batch()
            mean = norm / self.axis.size
            if squares / self.axis.size - mean * mean > (1e-3 * mean) ** 2:
                raise bad(
                    "a gradient of the output of a pipe that differs between ranks, each of which "
                    "computed another loss",
                    "the same loss of the same targets on all ranks, without random numbers",
                    "the same batch and loss on all ranks, without a DistributedSampler",
                )

    def meet(self) -> None:
        """All ranks ask for the state: compare the options of the last step, and the calls."""
        same = self.same
        same.forget_batch()
        same.facts["the number of calls"] = self.calls
        same.difference(1)
        with self.axis.ledger.phase("check"):
            differs = doubles_on([0], self.device) + same.difference_on_others()
            if begin_sum(differs, self.axis).wait().item():
                same.require()

    def _begin(self, batch: Any) -> None:
        same = self.same
        same.see_batch(batch)
        same.note_autocast()
        same.difference(self.calls)
        with self.axis.ledger.phase("check"):
            differs = doubles_on([0], self.device) + same.difference_on_others()
            own = torch.cat([differs, self.norm, self.norm.square()])
            self.unread = HostNumbers(begin_sum(self.scaling.joined(own), self.axis).wait())


def _dense_gradient(p: nn.Parameter) -> tuple[Tensor | None, int, int]:
    if p.grad is None or p.grad.layout != torch.strided or p.grad.is_complex():
        return None, 0, 0
    return p.grad, p.grad._version, 1


# --- the whole model ------------------------------------------------------------------------------


@torch.no_grad()
def restore(staged: Staging) -> None:
    """Replace the placeholders of other ranks' layers by the layers, with their values."""
    layers, axis, device = staged.stages.layers, staged.axis, staged.stages.device
    own = {number: p for stage in layers.own.values() for number, p in stage.items()}

    def value(like: Tensor, stages: tuple[int, ...], ours: Tensor | None) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        if ours is not None:
            whole.copy_(ours)
        broadcast(whole, axis, staged.owners(stages)[0])
        return whole

    for number, (_, stages, p) in enumerate(layers.parameters):
        ours = own.get(number)
        whole = value(p, stages, ours)
        if ours is None:
            own[number] = parameter_like(p, whole)
    for _, stages, (table, key), ours in layers.buffers:
        whole = value(table[key], stages, None if ours is None else ours[key])
        table[key] = whole
    for of in layers.standing:
        if of.real is not None:
            continue
        for module in of.twin.modules():
            _fill(module._parameters, own, layers.numbers)
        for name in layers.found[of.name].names:
            parent, _, key = name.rpartition(".")
            layers.model.get_submodule(parent)._modules[key] = of.twin
    for (table, key), p in layers.lent:
        table[key] = own[layers.numbers[id(p)]]


def _fill(table: dict[str, Any], own: dict[int, Tensor], numbers: dict[int, int]) -> None:
    for key, p in table.items():
        if p is not None:
            table[key] = own[numbers[id(p)]]
