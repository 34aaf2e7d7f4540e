"""The table of plans that are proved: a technique adds rows here, not files of tests.

`CANONICAL` has the plans of each technique; `covering.read()` those of the covering array, in which
every two words that may meet do meet. Ranks are threads; those of `ON_PROCESSES` are processes, as
those of all canonical plans under `make nightly`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.plan.plan import Plan
from tests.engine.cases import Task
from tests.engine.tensors import gpt_task
from tests.expert.moe import task as moe_task

ROWS = ("ddp", "zero1", "zero2", "zero3")

LONG = "long"
CANONICAL: dict[str, list[str]] = {
    # what one GPU can run of every technique that has an effect there
    "one process": [
        *("dp1 fp64", "dp1 fp32", "dp1 accumulate:3", "dp1 device_memory:4GiB", "dp1 zero1"),
        *("dp1 zero2", "dp1 zero3 accumulate:2"),
        *(f"dp1 recompute:{how}" for how in ("full", "selective", "every2", "256KiB", "head")),
        *("dp1 activations:host", "dp1 recompute:full arenas", "dp1 fp32 recompute:full"),
        *(f"dp1 offload:{what}" for what in ("optim", "optim@disk", "param@disk")),
        *("dp1 offload:optim-delayed=1", "dp1 fp32 offload:param", "dp1 offload:param tile:2=head"),
        "dp1 offload:param accumulate:2 recompute:full",
    ],
    "data rows": [
        *(f"dp2 {row}" for row in ROWS),
        *("dp_replicate2 dp_shard2 zero2", "dp4 row:R,S,S"),
        *("dp2 row:R,R,S", "dp2 row:R,R,R", "dp2 row:S,P,S", "dp2 row:S,R,S"),
        *("dp2 bucket:4KiB", "dp2 zero3 bucket:4KiB", "dp2 zero2 buffers:64KiB"),
        *("dp2 zero3 fp32", "dp2 zero1 fp32"),
        *("dp3 zero3 accumulate:2", "dp2 accumulate:3", "dp2 zero2 accumulate:2"),
    ],
    "tensor": ["tp2", "tp4 sp", "tp2 sp", "dp2 tp2 sp zero3", "tp2 accumulate:2"],
    "context": [
        *("cp2", "cp2 zero3", "cp2:ulysses", "cp2 zero3 recompute:full", "cp2 fp32"),
        "cp2 zero3 offload:optim",
    ],
    "pipeline": [
        *("pp2", "pp2 naive", "pp2 gpipe:3", "pp2 1f1b:4", "pp2 dapple:4", "pp2 interleaved:4x2"),
        *("pp2 bfs:4x2", "pp2 zb-h1:4", "pp2 zb-v:4", "pp2 dualpipe-v:4", "pp2 pipedream:4"),
        *("pp2 2bw:4", "pp2 dp2 zero3 1f1b:2", "pp3 1f1b:3 stages:1,3,1"),
    ],
    "experts": ["dp2 ep2", "dp2 ep2 accumulate:2"],
    "recomputation": [
        *(f"dp2 zero3 recompute:{how}" for how in ("full", "selective", "every2")),
        *("ddp recompute:blocks.0.mlp,blocks.1", "tp2 recompute:partitioned", "tp2 recompute:head"),
        *("pp2 gpipe:2 recompute:head", "tp2 sp recompute:full", "pp2 zb-v:4 recompute:full"),
        *("tp2 recompute:partitioned-host", "dp2 zero3 recompute:blocks.*.mlp,blocks.1"),
        *("dp2 zero3 activations:host", "pp2 1f1b:4 activations:host"),
    ],
    "offload": [
        *(f"dp2 zero2 offload:{what}" for what in ("optim", "optim@disk")),
        *(f"dp2 zero3 offload:{what}" for what in ("param", "param@disk")),
        *("dp2 zero1 offload:optim-delayed=1", "dp2 zero3 offload:optim"),
        *("dp2 offload:optim@disk", "dp1 offload:param", "dp2 zero1 offload:optim@disk"),
        *("dp2 zero3 accumulate:2 offload:optim@disk", "pp2 gpipe:2 offload:optim"),
        "tp2 offload:optim",
    ],
    "memory": [
        *("dp2 zero3 tile:2", "dp2 zero3 offload:optim-delayed=1 tile:3=head,*.mlp.*"),
        *("dp1 offload:param tile:3", "dp2 zero3 arenas recompute:full", "dp2 zero2 arenas"),
    ],
    "layers": [
        *("dp2 | blocks.1: zero3", "dp2 zero3 | head: tp2", "tp2 | blocks.1: dp2"),
        *("dp2 pp2 1f1b:2 | blocks.0: zero3", "dp2 zero3 | blocks.0: ddp recompute:full"),
        "dp2 zero2 | blocks.0: zero3 offload:param | embed: offload:optim",
        "dp2 zero3 | embed,head: tp2 | blocks.0: ddp recompute:full",
    ],
    # most of them on four ranks and more, or long: of these `make nightly` runs every one
    LONG: [
        *(f"dp4 {row}" for row in ROWS),
        *("dp_replicate2 dp_shard2 zero1", "dp_replicate2 dp_shard2 zero3"),
        *("tp4", "dp2 tp2 zero1", "cp4", "cp4:2x2 zero2", "cp2 tp2", "cp2 tp2 sp zero1"),
        *("cp4:ulysses zero1 accumulate:2", "cp2 pp2 zb-h1:2", "cp2:ulysses pp2 recompute:full"),
        *("cp2 pp2 1f1b:4", "dp2 cp2 zero3", "cp2 zero2 recompute:selective accumulate:2"),
        *("dp2 zero3 recompute:128KiB", "pp2 1f1b:3 recompute:full arenas"),
        *("cp2 ep2", "dp4 ep2 zero3", "pp2 dp2 ep2 1f1b:2"),
        *("dp2 cp2 ep2 zero3 accumulate:2", "cp2 2bw:4 pp2", "pp4 1f1b:8", "pp2 dp2 2bw:4"),
        *("pp2 tp2 sp zero1 zb-h1:2", "pp2 dp2 zero2 accumulate:2 gpipe:2"),
        *("pp2 dp2 zero3 interleaved:2x2 stages:2,1,1,1", "dp4 ep4 zero1", "dp2 ep2 tp2"),
        *("dp2 ep2 tp2 sp", "pp2 dp2 ep2 zero2 zb-h1:2"),
        "pp2 dp2 ep2 zero3 1f1b:2 accumulate:2 recompute:full",
        "dp2 pp2 1f1b:2 recompute:full | head: tp2",
        *("dp4 zero3 offload:optim", "dp_replicate2 dp_shard2 zero3 offload:param@disk"),
        "dp4 zero3 tile:5=head,*.mlp.*",
        *("pp4 pipedream:8", "pp3 2bw:4", "pp2 dp2 zero1 pipedream:4", "pp2 dp2 zero2 pipedream:4"),
        "dp_replicate2 dp_shard2 zero3 | blocks.0: dp4 zero1 | head,embed: tp2 dp2",
        "dp4 zero3 | embed,head: tp4 zero1 | blocks.0: tp2 dp2 recompute:full",
        *("dp2 tp2 | blocks.0.mlp: dp4 zero3 | head: tp4", "dp2 zero3 | blocks.*.mlp: tp2 zero1"),
        *("dp2 pp2 zb-h1:2 | blocks.*.mlp: tp2", "dp2 pp2 1f1b:2 | blocks.0.mlp: tp2"),
        "dp2 pp2 zero1 1f1b:2 | head: tp2 | blocks.0: zero3",
        "dp2 tp2 pp2 gpipe:2 | blocks.0.mlp: dp4 zero3 | head: tp4",
        *(f"dp4 {row} accumulate:2 buffers:3KiB" for row in ROWS),
        *("tp2 sp buffers:3KiB", "dp2 tp2 zero1 buffers:3KiB"),
        *("pp2 dp2 zero2 gpipe:2 buffers:3KiB", "pp2 dp2 tp2 zero3 1f1b:2"),
    ],
}
#: Plans in 16 bits, and words that change no bit of them.
EQUAL_16: dict[str, list[str]] = {
    "dp1 bf16": ["offload:optim", "offload:optim@disk", "offload:param", "recompute:full"],
    "dp1 fp16": ["offload:optim", "offload:param@disk", "activations:host"],
    "dp2 bf16": ["offload:optim", "offload:optim@disk", "offload:param", "offload:param@disk"],
    "dp2 zero1 fp16": ["offload:optim", "offload:optim@disk"],
    "dp2 zero2 bf16": [*("offload:optim", "offload:optim@disk", "arenas", "recompute:full")],
    "dp2 zero2 accumulate:2 fp16": ["offload:optim", "offload:optim@disk"],
    "dp2 zero3 fp16": [
        *("offload:param", "offload:param@disk", "offload:optim", "recompute:full"),
        *("activations:host", "bucket:4KiB"),
    ],
    "dp_replicate2 dp_shard2 zero2 bf16": [],
    "dp2 tp2 sp zero3 fp16": [],
    "tp2 bf16": ["offload:optim", "recompute:partitioned"],
    "pp2 1f1b:4 fp16": ["offload:optim@disk", "recompute:full"],
    "pp2 dp2 zero3 zb-v:2 bf16": [],
    "pp2 tp2 sp zero1 gpipe:2 bf16": [],
    "dp2 zero3 bf16 tile:3=head,*.mlp.*": ["offload:param"],
    "dp2 zero3 fp16 tile:3=head,*.mlp.*": ["offload:optim@disk"],
    "dp2 zero3 bf16 | head: tp2 zero1": [],
    "dp2 fp16 | head: tp2 zero1": [],
    "pp2 dp2 zero3 gpipe:2 fp16": [],
    "dp2 zero2 fp16 offload:optim-delayed=9": [],
}
#: Those that run in 16 bits under `make test`, each with its first word.
FEW_16 = (
    *("dp2 bf16", "dp2 zero2 bf16", "dp2 zero3 fp16", "tp2 bf16", "pp2 1f1b:4 fp16"),
    *("dp2 zero3 fp16 tile:3=head,*.mlp.*", "dp2 fp16 | head: tp2 zero1"),
    "dp2 zero2 fp16 offload:optim-delayed=9",
)
#: One plan for each way in which ranks send to each other, or to the host and its disk.
ON_PROCESSES = {
    *("dp2 ddp", "dp2 zero1", "dp2 zero3 bucket:4KiB", "dp_replicate2 dp_shard2 zero2"),
    *("dp2 tp2 sp zero3", "tp2 recompute:partitioned", "cp2", "cp2:ulysses", "dp2 ep2"),
    *("pp2 1f1b:4", "pp2 zb-v:4", "pp2 2bw:4", "dp2 zero1 offload:optim-delayed=1"),
    *("dp2 zero3 offload:param@disk", "dp2 zero3 activations:host"),
    "dp2 zero3 | embed,head: tp2 | blocks.0: ddp recompute:full",
    "dp_replicate2 dp_shard2 zero2 bf16",
}
#: Words of no plan above, and where they are proved.
ELSEWHERE = {
    "offload:auto": "tests/engine/test_offload.py"  # chosen before any rank starts
}


def every_plan() -> list[str]:
    pairs = [[plan, *(f"{plan} {word}" for word in words)] for plan, words in EQUAL_16.items()]
    return [plan for plans in [*CANONICAL.values(), *pairs] for plan in plans]


BATCH_ROWS = 17  # of each global batch
#: The training of each kind of model: GPTs whose sizes divide by nothing convenient, and a mixture
#: whose experts drop tokens.
TASKS = {
    "mixture": moe_task("topk-renormalised", 1.0, rows=BATCH_ROWS),
    "mixture without a capacity": moe_task("topk", rows=BATCH_ROWS),
    "untied": gpt_task("untied", rows=BATCH_ROWS),
    "tied": gpt_task("tied", rows=BATCH_ROWS),
}


class Adds(torch.autograd.Function):
    """Adds a gradient of its own to that of `term`, as routers of transformers do."""

    @staticmethod
    def forward(_: Any, *of: Tensor) -> Tensor:
        return of[0].view_as(of[0])

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


def with_gradients_of_its_own(task: Task) -> Task:
    """A hook, and a function in the forward of a block, add numbers to gradients of weights."""

    def make() -> nn.Module:
        model = task.make()
        model.get_parameter("blocks.0.mlp.up.weight").register_hook(lambda grad: grad + 0.01)

        def added(module: nn.Module, args: Any, x: Tensor) -> Any:
            return Adds.apply(x, 0.02 * module.get_parameter("weight").sum())

        model.get_submodule("blocks.1.mlp.up").register_forward_hook(added)
        return model

    return replace(task, make=make)


TASKS |= {f"{kind}, hooks": with_gradients_of_its_own(TASKS[kind]) for kind in ("untied", "tied")}


def kind_of(text: str) -> str:
    """The kind of model that the plan trains: a mixture where experts are spread, else a GPT."""
    plan = Plan.parse(text)
    if plan.ep > 1:
        return "mixture" if plan.cp == 1 else "mixture without a capacity"
    own_head = plan.sp or plan.layers or "head" in (plan.tile or "")
    stale = (plan.pipeline or "").startswith("pipedream")  # whose stages share no weight
    kind = "untied" if own_head or stale else "tied"
    # layers with a mesh of their own compute several microbatches at once; tiles have no `weight`
    seen = plan.precision in (None, "fp64", "fp32") and not (plan.layers or plan.tile)
    return f"{kind}, hooks" if seen else kind
