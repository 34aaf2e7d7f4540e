"""The oracles of a plan, chosen by its precision and schedule.

fp64, fp32        one oracle in that precision
bf16, fp16        two with the same rounded initial weights: in fp64, and in 16 bits
pipedream, 2bw    the same, with the asynchronous oracle, which needs each parameter's stage
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import allowed
from shardwise.engine.optimizer.optimizer_spec import AdamW, OptimizerSpec
from shardwise.engine.options import Loss
from shardwise.engine.precision import DTYPES
from shardwise.techniques.expert.apply import experts_in, layers_of
from shardwise.techniques.expert.moe_layer import name_layers
from shardwise.techniques.pipeline import stage_module
from shardwise.verify.oracles.async_oracle import AsyncOracle, Staleness, pipedream, two_buffered
from shardwise.verify.oracles.mixture_oracle import Mixture
from shardwise.verify.oracles.oracle import HALF, Microbatches, Oracle, Task, rows_of

#: Small enough that no gradient of these models overflows in fp16.
LOSS_SCALE: Final = 2.0**8
ASYNCHRONOUS: Final = ("pipedream", "2bw")


@dataclass(frozen=True)
class Oracles:
    """The oracles of a run: `exact`, and in 16 bits also `alone`, in the same precision. `start`
    are the common initial weights in 16 bits, where only the change is compared. In fp32
    `perturbed` began with other last bits of the weights (difference.py).
    """

    exact: Oracle | AsyncOracle
    alone: Oracle | AsyncOracle | None = None
    start: Mapping[str, Tensor] | None = None
    perturbed: Oracle | AsyncOracle | None = None

    @property
    def all(self) -> tuple[Oracle | AsyncOracle, ...]:
        return (self.exact, *(o for o in (self.alone, self.perturbed) if o is not None))

    @property
    def nearest(self) -> Oracle | AsyncOracle:
        return self.alone or self.exact

    @property
    def unit(self) -> float:
        return 0.0 if self.alone is None else torch.finfo(self.alone.dtype).eps / 2


def oracles_of(
    build: Callable[[], nn.Module],
    plan: Plan,
    spec: OptimizerSpec,
    loss: Loss,
    tokens: Callable[[Any], float] | None = None,
    starts: tuple[str, ...] | None = None,
) -> Oracles:
    """The oracles for a model that `build()` makes, each time with the same weights."""

    def oracle(dtype: torch.dtype, rounded: torch.dtype | None = None) -> Oracle | AsyncOracle:
        """In a precision, from weights that were rounded to another one."""
        model, task = build(), Task(loss, tokens or rows_of, optimizer_of(spec), rounded)
        name_layers(model)  # their random numbers are those of the run
        for layer in layers_of(model).values():
            layer.forward = Mixture(layer)
        if is_asynchronous(plan):
            return AsyncOracle(model, task, dtype, staleness_of(model, task.loss, plan, starts))
        scale, offload = LOSS_SCALE if dtype is torch.float16 else 1.0, plan.offloaded
        undelayed = None if offload is None else offload.undelayed
        return Oracle(model, task, dtype, scale, undelayed, microbatches_of(model, plan))

    dtype = DTYPES[plan.precision]
    if dtype is None:
        dtype = next(p.dtype for p in build().parameters() if p.is_floating_point())
    if dtype not in HALF:
        return Oracles(oracle(dtype))
    exact = oracle(torch.float64, dtype)
    start = {name: value.clone() for name, value in exact.weights.values().items()}
    return Oracles(exact, oracle(dtype), start)


def microbatches_of(model: nn.Module, plan: Plan) -> Microbatches:
    """The plan's microbatches; only experts compute each alone, as other losses are means."""
    each = "microbatch" if experts_in(model) else "batch"
    return Microbatches(plan.shares, plan.microbatches, each)


def is_asynchronous(plan: Plan) -> bool:
    return (plan.pipeline or "").partition(":")[0] in ASYNCHRONOUS


def staleness_of(
    model: nn.Module, loss: Loss, plan: Plan, starts: tuple[str, ...] | None
) -> Staleness:
    """The staleness of an asynchronous plan, by the rule of its paper."""
    ranks = plan.mesh.size_of("pp")
    name, numbers = allowed(plan.pipeline or "", ranks)
    calls = stage_module.calls_under(plan, model, loss)
    begin = stage_module.stage_starts(model, plan, starts, calls)
    at = stage_module.stages_of(model, begin, calls)
    stage = {name: stages[0] for name, stages in at.items()}
    m = numbers.m
    update, rule = (1, pipedream(ranks)) if name == "pipedream" else (m, two_buffered(m))
    return Staleness(plan.shares, m, update, rule, stage)


def optimizer_of(spec: OptimizerSpec) -> Callable[[Mapping[str, nn.Parameter]], Optimizer]:
    """Torch's optimizer of that class and options; the first group pattern that matches applies."""

    def build(params: Mapping[str, nn.Parameter]) -> Optimizer:
        """Over parameters by name."""
        patterns = [*spec.groups, "*"]
        members: dict[str, list[nn.Parameter]] = {}
        for name, p in params.items():
            members.setdefault(next(g for g in patterns if fnmatch(name, g)), []).append(p)
        groups = [{"params": ps, **spec.groups.get(g, {})} for g, ps in members.items()]
        return spec.kind(groups, **spec.options)

    return build


# --- the optimizer of a proof ---------------------------------------------------------------------
# AdamW with two groups and no option at its default: a forgotten option would show. An update
# multiplies the rounding of a gradient that is zero by rate / epsilon; with the usual 1e-8 a bias
# that began at 0 would be all error. In fp64 there is room for a factor of 1e4.

#: The rate and epsilon by precision, and for 16 bits.
RATES, RATES_16 = {"fp64": (1e-3, 1e-4), "fp32": (1e-2, 1e-1)}, (1e-2, 1e-2)
#: The factors of all rates in the steps of a proof, over and over.
FACTORS: Final = (1.0, 0.5, 1.5)


def spec_of(plan: Plan, model: nn.Module) -> OptimizerSpec:
    """The optimizer of a proof of `plan` on `model`, which may be on the meta device."""
    lr, eps = RATES.get(plan.precision or "fp64", RATES_16)
    pattern = second_group([n for n, p in model.named_parameters() if p.requires_grad])
    own = {"lr": 2 * lr, "weight_decay": 0.3, "betas": (0.7, 0.9)}
    groups = {pattern: own} if pattern else {}
    return AdamW(groups, lr=lr, betas=(0.8, 0.95), eps=eps, weight_decay=0.1)


def second_group(names: Sequence[str]) -> str:
    """A pattern of parameters by the end of their names, about half of all; "" if there is none."""
    endings = {".".join(name.split(".")[-words:]) for name in names for words in (1, 2)}
    matches = {f"*{end}": sum(fnmatch(name, f"*{end}") for name in names) for end in endings}
    some = {pattern: n for pattern, n in matches.items() if 0 < n < len(names)}
    return min(some, key=lambda pattern: (abs(2 * some[pattern] - len(names)), pattern), default="")


def factor_of(step: int) -> float:
    return FACTORS[step % len(FACTORS)]
