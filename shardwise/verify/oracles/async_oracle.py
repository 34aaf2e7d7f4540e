"""The oracle of asynchronous pipelines: training in one process with the same stale weights.

    for each microbatch i, of all data ranks together, in order:
        w[s] = version[s][rule(s, i)]              of every stage s
        g[s] += gradient of the loss at w, by its tokens, whole model, plain autograd
        after every `update`-th:  version[s] += [an optimizer's step from the mean of g[s]]

                    update    rule(s, i)               p stages
    PipeDream       1         max(0, i - (p-1-s))      SOSP 2019, section 3.3
    2BW             m         max(0, i // m - 1)       arXiv 2006.09503, section 3.1

It has no ranks, messages, schedules or buffers: each version is a separate tensor, and forward and
backward of a microbatch run at once. Like oracle.py it imports nothing else of the package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.verify.oracles.oracle import (
    Lowered,
    Microbatches,
    Task,
    Weights,
    backward,
    in_eval_mode,
)

#: The version of stage s that microbatch i uses: the number of updates of its weights.
Rule = Callable[[int, int], int]


@dataclass(frozen=True)
class Staleness:
    """The order of an asynchronous schedule: `microbatches` of each data rank make a step; every
    `update`-th updates all stages. `stage`: which one trains each parameter.
    """

    data_ranks: int
    microbatches: int
    update: int
    version: Rule
    stage: Mapping[str, int]


def pipedream(stages: int) -> Rule:
    return lambda stage, i: max(0, i - (stages - 1 - stage))


def two_buffered(microbatches: int) -> Rule:
    return lambda _, i: max(0, i // microbatches - 1)


class AsyncOracle:
    """The training of `model`, in place, in one process, with stale weights."""

    def __init__(self, model: nn.Module, task: Task, dtype: torch.dtype, how: Staleness) -> None:
        self.model, self.task, self.dtype, self.how = model, task, dtype, how
        self.weights = Weights(model, task, dtype, old=True)

    def step(self, batch: Any, clip: float | None = None, idle: int = 0) -> float:
        """The updates of a global batch; its mean loss. The last `idle` data ranks have no rows."""
        if clip is not None:
            raise ValueError("stages that update at different times have no common norm to clip")
        how, params = self.how, self.weights.params
        parts = Microbatches(how.data_ranks, how.microbatches).of(batch, idle)
        versions = [{name: p.detach().clone() for name, p in params.items()}]
        sums: dict[str, Tensor | None] = dict.fromkeys(params)
        counts = [self.task.tokens(part) for part in parts]
        summed = 0.0
        for i in range(how.microbatches):
            for name, p in params.items():
                p.data = versions[how.version(how.stage[name], i)][name].clone()
            first = i - i % how.update
            of_update = [n for n in counts[first : first + how.update] if n]
            if counts[i]:
                share = counts[i] * len(of_update) / sum(of_update)
                summed += self._learn(parts[i], share, sums) * counts[i]
            if (i + 1) % how.update == 0:
                mean = {n: g if g is None else g / len(of_update) for n, g in sums.items()}
                self.weights.update(mean, None)
                versions.append({name: p.detach().clone() for name, p in params.items()})
                sums = dict.fromkeys(params)
        return summed / max(1, sum(counts))

    def _learn(self, part: Any, share: float, sums: dict[str, Tensor | None]) -> float:
        params = self.weights.params
        loss = self.task.loss_of(self.model, part, self.dtype)
        backward(loss * share, self.dtype)
        for name, p in params.items():
            gradient, p.grad = p.grad, None
            if gradient is not None:
                more, before = gradient.to(self.weights.masters[name].dtype), sums[name]
                sums[name] = more if before is None else before + more
        return loss.item()

    def of_ranks(self, batch: Any, _idle: int = 0) -> list[Any]:
        return [batch]

    def evaluate(self, call: Callable[[nn.Module], Tensor]) -> Tensor:
        with Lowered(self.dtype):
            return in_eval_mode(self.model, call)
