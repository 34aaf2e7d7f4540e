"""this file is the judge of plans that update by themselves: one process, the same stale weights.

    for each microbatch i, of all data ranks at once, in order:
        w[s] = version[s][max(0, i // update - lag[s])]          of every stage s
        g[s] += gradient of the sum of losses at w, whole model, plain autograd
        after every `update`-th:  version[s] += [an optimizer's step from g[s] / tokens], g[s] = 0

No rank, no message, no schedule's row and no buffer: each version is a tensor of its own, and a
microbatch goes forward and backward at once.  With it PipeDream's rule is not a claim about what
runs, but a sum that must come out (SOSP 2019, section 3.3; arXiv 2006.09503, section 3.1).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.core.plan import Plan
from shardwise.engine import staging
from shardwise.engine.batch import cast, filled, rows, split
from shardwise.engine.box import Box
from shardwise.engine.recipe import Recipe
from shardwise.engine.training import DTYPES, Loss, Metrics

HALF = (torch.bfloat16, torch.float16)


class Simulation:
    """The training of a model by `plan`, in one process: as an engine as far as a proof asks.

    `model` is trained in place. `starts` begin its stages, as in parallelize.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        recipe: Recipe,
        loss: Loss,
        tokens: Callable[[Any], int] | None = None,
        starts: tuple[str, ...] | None = None,
    ) -> None:
        schedule = staging.schedule_of(plan)
        assert schedule is not None
        self.schedule, self.data_ranks = schedule, plan.data_size
        self.model, self.loss, self.tokens = model, loss, tokens or rows
        self.dtype = DTYPES[plan.precision]
        at = staging.stages_of(model, staging.fitting(model, plan, starts))
        self._cast()
        self.stage = {name: at[name][0] for name, p in model.named_parameters() if p.requires_grad}
        self.params = {n: p for n, p in model.named_parameters() if n in self.stage}
        # what the optimizer steps on: of 16 bits the fp32 masters
        self.targets = {
            n: nn.Parameter(p.detach().clone().float() if p.dtype in HALF else p.detach().clone())
            for n, p in self.params.items()
        }
        self.optimizer = recipe.build(list(self.targets.items()))
        self.used: dict[str, Tensor] = {}

    def _cast(self) -> None:
        for p in self.model.parameters():
            p.data = p.data.to(self.dtype) if p.is_floating_point() else p.data
        for b in self.model.buffers():
            double = self.dtype is torch.float64 and b.is_floating_point()
            b.data = b.data.double() if double else b.data

    def step(self, batch: Any) -> Metrics:
        """One run of the schedule on the global batch: all its updates."""
        n, m, every = self.data_ranks, self.schedule.microbatches, self.schedule.update
        shares = [
            split(pytree.tree_map_only(Tensor, lambda x, r=r: x.tensor_split(n)[r], batch), m)
            for r in range(n)
        ]
        versions = {name: [p.detach().clone()] for name, p in self.params.items()}
        sums: dict[str, Tensor] = {}
        summed, tokens, count = 0.0, 0, 0
        for i in range(m):
            for name, p in self.params.items():
                p.data = versions[name][self.schedule.version(self.stage[name], i)].clone()
            for share in shares:
                own = self.tokens(share[i])
                summed += self._learn(share[i], own, sums)
                count += own
            if (i + 1) % every == 0:
                self._update(sums, count, versions)
                tokens, count, sums = tokens + count, 0, {}
        for name, p in self.params.items():
            p.data = versions[name][-1].clone()
        lr = float(self.optimizer.param_groups[0]["lr"])
        return Metrics(summed / max(1, tokens), tokens, None, False, lr, 0)

    def _learn(self, part: Any, count: int, sums: dict[str, Tensor]) -> float:
        """Add a microbatch's gradients, of the sum over its tokens; returns that sum."""
        if not count:
            return 0.0
        loss = self.loss(self.model, cast(filled(part), self.dtype))
        found = torch.autograd.grad(loss * count, list(self.params.values()), allow_unused=True)
        for name, gradient in zip(self.params, found, strict=True):
            if gradient is not None:
                more = gradient.to(self.targets[name].dtype)
                sums[name] = sums[name] + more if name in sums else more
        return loss.item() * count

    def _update(
        self, sums: dict[str, Tensor], count: int, versions: dict[str, list[Tensor]]
    ) -> None:
        for name, target in self.targets.items():
            target.grad = sums[name] / count if name in sums else None
        self.used = {n: t.grad for n, t in self.targets.items() if t.grad is not None}
        self.optimizer.step()
        for name, target in self.targets.items():
            versions[name].append(target.detach().to(self.params[name].dtype).clone())

    def gradients(self) -> list[Box]:
        """Those of the last update, whole."""
        zeros = {name: torch.zeros_like(t) for name, t in self.targets.items()}
        return [_box(f"grad/{name}", t) for name, t in (zeros | self.used).items()]

    def boxes(self) -> list[Box]:
        """The weights, as precise as there are any, whole."""
        return [_box(f"model/{name}", t.detach()) for name, t in self.targets.items()]


def _box(name: str, whole: Tensor) -> Box:
    shape = tuple(whole.shape)
    return Box(name, shape, (0,) * whole.dim(), shape, whole, 0)
