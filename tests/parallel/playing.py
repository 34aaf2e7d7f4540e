"""All stages of a model played one after the other in one process, by a copy for each rank."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwise.techniques.pipeline.stage import Ran
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import twin
from tests.parallel.between import LENGTH, WIDTH

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], Tensor]


def settled(model: nn.Module) -> nn.Module:
    """The model in fp64, with weights that follow from their names."""
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.4, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return model


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed)
    shape = (2, count, LENGTH, WIDTH)
    x, y = torch.randn(shape, generator=own, dtype=torch.float64)
    return x, y


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


@dataclass
class Played:
    """The sum of the losses of all microbatches, and its gradients by name."""

    loss: Tensor
    grads: dict[str, Tensor]
    ranks: list[Stages] = field(default_factory=list)
    traces: list[StageTrace] = field(default_factory=list)


def whole(model: nn.Module, loss: Loss, batches: Sequence[Any]) -> Played:
    """The oracle: the model as it is."""
    model = copy.deepcopy(model)
    total = sum((loss(model, batch) for batch in batches), torch.zeros(()))
    total.backward()
    grads = {name: grad(p) for name, p in model.named_parameters()}
    return Played(total.detach(), grads)


def staged(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    starts: Sequence[str],
    ranks: Sequence[Sequence[int]] = (),
    **how: Any,
) -> Played:
    """The same in stages; `ranks` says which stages each rank has, else each has one."""
    count = len(starts) + 1
    ranks = ranks or [[stage] for stage in range(count)]
    parts: list[Stages] = []
    for mine in ranks:
        own = copy.deepcopy(model)
        parts.append(Stages(own, twin(own), starts, mine, CPU, **how))
    owner = {stage: part for part, mine in zip(parts, ranks, strict=True) for stage in mine}
    played = Played(torch.zeros(()), {}, parts)
    tapes = [forward(owner, count, loss, batch, played) for batch in batches]
    for tape in tapes:
        played.loss = played.loss + backward(tape, count)
    for part in parts:
        for number, p in {n: p for own in part.layers.own.values() for n, p in own.items()}.items():
            name = part.layers.parameters[number][0]
            played.grads[name] = played.grads.get(name, torch.zeros(())) + grad(p)
    return played


def forward(
    owner: dict[int, Stages], count: int, loss: Loss, batch: Any, played: Played
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
    played.traces.append(traces[id(owner[0])])
    return tape


def backward(tape: list[tuple[list[Tensor], Ran]], count: int) -> Tensor:
    """Gradients handed back from stage to stage; the loss."""
    loss = tape[-1][1].result
    loss.backward()
    for stage in reversed(range(count - 1)):
        pairs = zip(tape[stage][1].outputs, tape[stage + 1][0], strict=True)
        trained = [(x, grad(leaf)) for x, leaf in pairs if x.requires_grad]
        if trained:
            torch.autograd.backward([x for x, _ in trained], [g for _, g in trained])
    return loss.detach()


def grad(p: Tensor) -> Tensor:
    """Its gradient, zeros where none came."""
    return torch.zeros_like(p) if p.grad is None else p.grad


def check(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    starts: Sequence[str],
    ranks: Sequence[Sequence[int]] = (),
    **how: Any,
) -> Played:
    """Compare both: loss and every gradient to 1e-12 of the largest."""
    right, found = whole(model, loss, batches), staged(model, loss, batches, starts, ranks, **how)
    torch.testing.assert_close(found.loss, right.loss, rtol=1e-12, atol=0, check_dtype=False)
    assert found.grads.keys() == right.grads.keys()
    for name, expected in right.grads.items():
        scale = max([1.0, *expected.abs().flatten().tolist()])
        torch.testing.assert_close(
            found.grads[name],
            expected,
            rtol=0,
            atol=1e-12 * scale,
            msg=lambda m, n=name: f"{n} {m}",
        )
    return found
