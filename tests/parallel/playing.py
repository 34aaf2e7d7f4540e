"""All stages of a model played one after the other in one process, by a copy for each rank."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.techniques.pipeline.stage import Ran
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import twin
from tests.engine import cases
from tests.parallel.between import LENGTH, WIDTH

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], Tensor]
Grads = dict[str, Tensor]


def settled(model: nn.Module) -> nn.Module:
    """The model in fp64, with weights that follow from their names."""
    return cases.settled(model.double())


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x, y = torch.randn((2, count, LENGTH, WIDTH), generator=own, dtype=torch.float64)
    return x, y


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def grad(p: Tensor) -> Tensor:
    """Its gradient, zeros where none came."""
    return torch.zeros_like(p) if p.grad is None else p.grad


def staged(
    model: nn.Module, loss: Loss, batches: Sequence[Any], ranks: Sequence[Stages], count: int
) -> tuple[Tensor, Grads]:
    """The sum of the losses of all microbatches, and its gradients by name, in stages."""
    owner = {stage: part for part in ranks for stage in part.layers.own_stages}
    tapes = [forward(owner, count, loss, batch) for batch in batches]
    total = sum((backward(tape) for tape in tapes), torch.zeros(()))
    grads: Grads = {}
    for part in ranks:
        for number, p in {n: p for own in part.layers.own.values() for n, p in own.items()}.items():
            name = part.layers.parameters[number][0]
            grads[name] = grads.get(name, torch.zeros(())) + grad(p)
    return total, grads


def forward(
    owner: dict[int, Stages], count: int, loss: Loss, batch: Any
) -> list[tuple[list[Tensor], Ran]]:
    """The leaves given to each stage, and what it made of them."""

    def call(model: nn.Module) -> Tensor:
        return loss(model, batch)

    traces = {id(part): part.trace(call) for part in owner.values()}
    assert len({trace.bundles for trace in traces.values()}) == 1  # all ranks know the same
    tape: list[tuple[list[Tensor], Ran]] = []
    given: list[Tensor] = []
    for stage in range(count):
        trace = traces[id(owner[stage])]
        ran = owner[stage].run(stage, trace, given, call)
        tape.append((given, ran))
        specs = trace.bundles[stage] if stage < count - 1 else ()
        assert [(tuple(x.shape), x.dtype, x.requires_grad) for x in ran.outputs] == list(specs)
        assert all(x.is_contiguous() for x in ran.outputs)
        given = [x.detach().requires_grad_(x.requires_grad) for x in ran.outputs]
    return tape


def backward(tape: list[tuple[list[Tensor], Ran]]) -> Tensor:
    """Gradients handed back from stage to stage; the loss."""
    loss = tape[-1][1].result
    loss.backward()
    for (_, ran), (leaves, _) in zip(tape[-2::-1], tape[:0:-1], strict=True):
        pairs = zip(ran.outputs, leaves, strict=True)
        trained = [(x, grad(leaf)) for x, leaf in pairs if x.requires_grad]
        if trained:
            torch.autograd.backward([x for x, _ in trained], [g for _, g in trained])
    return loss.detach()


def check(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    starts: Sequence[str],
    ranks: Sequence[Sequence[int]] = (),
    **how: Any,
) -> None:
    """Loss and every gradient are the plain model's, to 1e-12 of the largest.

    `ranks` says which stages each rank has, else each has one.
    """
    plain, parts, count = copy.deepcopy(model), list[Stages](), len(starts) + 1
    total = sum((loss(plain, batch) for batch in batches), torch.zeros(()))
    total.backward()
    for mine in ranks or [[stage] for stage in range(count)]:
        own = copy.deepcopy(model)
        parts.append(Stages(own, twin(own), starts, mine, CPU, **how))
    found, grads = staged(model, loss, batches, parts, count)
    torch.testing.assert_close(found, total.detach(), rtol=1e-12, atol=0, check_dtype=False)
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, p in plain.named_parameters():
        bound = 1e-12 * max([1.0, *grad(p).abs().flatten().tolist()])
        torch.testing.assert_close(grads[name], grad(p), rtol=0, atol=bound)
