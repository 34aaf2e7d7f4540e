"""Calls and plans that cannot work, and the phrase in their one paragraph; no rank is started.

A row is added here, not a test.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.callbacks import Callback, Callbacks
from shardwise.comm.move import all_to_all, move
from shardwise.comm.start.launch import spawn
from shardwise.comm.start.rendezvous import read_limits
from shardwise.comm.world import alone, traced
from shardwise.core.errors import InputError
from shardwise.core.layouts.layout import P, Placement, R, S
from shardwise.core.mesh import Mesh
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Row
from shardwise.models import gpt, moe
from shardwise.models.registry import find
from tests.engine.cases import CONFIG, ranks_of, small_gpt, tied_gpt
from tests.engine.pipelines import deep
from tests.engine.tensors import made

GIVEN = {"offload_folder": tempfile.gettempdir(), "loss": gpt.loss}


def engine_of(plan: str, model: nn.Module | None = None, **options: Any) -> sw.Engine:
    model = nn.Linear(2, 2) if model is None else model
    return sw.parallelize(model, plan, traced(0, ranks_of(plan)), **(GIVEN | options))


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    return grad.square().sum()


def made_in_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def part_first() -> nn.Module:
    return nn.Sequential(sw.FSDP(nn.Linear(2, 2), world=alone()), nn.Linear(2, 2))


def part_later() -> nn.Module:
    return sw.FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), units=nn.Linear, world=alone())


#: Calls, and the pattern of their paragraph.
CALLS: list[tuple[Callable[[], Any], str]] = [
    # ranks
    *(
        (partial(spawn, **({"function": engine_of} | options)), said)
        for options, said in (
            ({"ranks": 0}, "ranks=0.*a whole number from 1 up.*ranks=2"),
            ({"ranks": "2"}, "ranks='2'.*a whole number from 1 up"),
            ({"device": "tpu"}, "device='tpu'.*cpu or cuda"),
            ({"device": "cuda", "ranks": 10**6}, "1000000 ranks on cuda.*one GPU for each"),
            ({"ranks": 10**6}, "1000000 processes on this machine.*more on several machines"),
            ({"args": (lambda: None,)}, "cannot import.*top level of a module"),
            ({"function": "work"}, r"spawn of .*Write instead: spawn\(work, 2\)"),
        )
    ),
    *(
        (partial(read_limits, {"SHARDWISE_PATIENCE_S": text}), f"SHARDWISE_PATIENCE_S='{text}'")
        for text in ("soon", "0", "inf")
    ),
    # placements, meshes and plans
    *((partial(Placement.parse, t), "Write instead: ") for t in ("", "X", "S", "S-1", "r")),
    *((partial(Placement, *of), "S with one from 0 up") for of in (("S",), ("R", 0), ("S", -1))),
    *(
        (partial(Mesh.parse, text), "Write instead: ")
        for text in ("dp", "2dp", "dp-2", "dp0", "xx2", "dp2 dp2", "dp2.5")
    ),
    *(
        (partial(Mesh.parse("dp2 tp2").coordinate, rank), f"rank {rank} of the mesh 'dp2 tp2'.")
        for rank in (-1, 4)
    ),
    (lambda: alone().on(Mesh.parse("dp4")), r"mesh 'dp4' of 4 ranks in a world of 1.*'dp1'"),
    (lambda: move(torch.zeros(5, 2), traced(0, 2).everyone, R, S(0)), "pad the dim to 6"),
    *(
        (partial(all_to_all, torch.zeros(4, 2), traced(0, 2).everyone, *counts), "of 4 rows on")
        for counts in (([2], [2, 2]), ([2, 2], [2, 1]), ([1, 2], [2, 2]), ([2, -1], [2, 2]))
    ),
    (lambda: Plan("dp2"), r'Write instead: Plan\.parse\("dp2"\)'),  # type: ignore[arg-type]
    (partial(Plan.parse, "dp4,TP2 zero3"), "Write instead: dp4 tp2 for 'dp4,TP2'"),
    *(
        (partial(Plan, **{name: value}), "Write instead: ")
        for name, value in (
            *(("row", "zero4"), ("bucket_bytes", -4), ("schedule", "gpipe")),
            *(("offload", "a b"), ("axes", (("xx", 2),)), ("axes", (("dp", 2), ("dp", 4)))),
        )
    ),
    *(
        (partial(Plan.parse, f"dp2 zero3 {word}"), "tile:4")
        for word in ("tile", "tile:", "tile:x", "tile:0", "tile:1", "tile:2.5", "tile:2=")
    ),
    (lambda: Row(S(0), P, R), "'row:S,P,R'.*needs the whole parameter.*row:S,P,S"),
    (lambda: Row(R, S(0), R), "'row:R,S,R'.*needs the whole gradient.*row:R,S,S"),
    *(
        (partial(Row, *of), "and an optimizer state that are R or S")
        for of in ((P, P, R), (R, P, P))
    ),
    (lambda: Row(R, S(1), S(0)), "sharded on dim 1"),
    # stages
    *(
        (partial(engine_of, plan, deep(), **options), said)
        for plan, options, said in (
            ("pp16 1f1b:4", {}, r"16 stages for a Sequential of 8 layers.*pp8"),
            ("pp2 1f1b:4", {"stages": ["9.x"]}, r'"9\.x", which is no module of the Seq'),
            ("pp2 1f1b:4", {"stages": ["4", "8"]}, r"2 starts \(4, 8\) for 2.*stages=None"),
            ("pp4 1f1b:4", {"stages": []}, r"0 starts \(none\) for 4 stages"),
            ("pp2 stages:3,5", {"stages": ["4"]}, r"whose stages begin at \['6'\].*or no stages="),
        )
    ),
    (lambda: engine_of("recompute:full", nn.Sequential(nn.Linear(6, 6))), "no .*recompute:0"),
    (
        lambda: engine_of("pp2 1f1b:2 recompute:full", small_gpt(), stages=["blocks.1.mlp"]),
        "recomputes blocks.1, with a stage that begins inside of it",
    ),
    (
        lambda: engine_of("fp64", on_nonfinite="ignore"),
        "on_nonfinite='ignore'.*raise, skip or skip:6",
    ),
    (
        lambda: engine_of("pp2 2bw:2 fp64", small_gpt(), on_nonfinite="skip"),
        "on_nonfinite='skip' with 2bw:2.*1f1b:2",
    ),
    *(
        (
            partial(engine_of, f"{words} fp64", made("untied"), check_every="9 rerun:2"),
            rf"rerun:2\" under .*\(it has {reason}.*Write instead: check_every=9",
        )
        for words, reason in (
            ("dp2 tp2", "tp2"),
            ("dp2 zero3 offload:optim", "offload:optim"),
            ("dp1", "one data rank"),
        )
    ),
    # gradients inside of a loss
    (
        lambda: engine_of("pp2 1f1b:2", deep(), loss=penalised).step(torch.rand(2, 8)),
        r"a gradient inside of the forward of a pipeline.*torch\.autograd\.grad",
    ),
    # callbacks and metrics
    (lambda: Callbacks([object()]), "without run_began, step_ended"),  # type: ignore[list-item]
    (lambda: Callbacks([Callback]), r"a class.*Mine\(\)"),  # type: ignore[list-item]
    (
        lambda: Callbacks([]).step_ended(1, {"norm": "large"}),  # type: ignore[dict-item]
        r"the metric 'norm' = 'large'.*a number",
    ),
    # tables
    (lambda: engine_of("tp2", nn.Sequential(nn.Linear(4, 4), nn.ReLU())), "no table of styles"),
    *(
        (partial(engine_of, plan, made("untied"), table=table), said)
        for plan, table, said in (
            ("tp2", {}, "a table without a style.*Write instead: table="),
            ("tp2", {"block.*.mlp.up": "colwise"}, r"blocks\.\*\.mlp"),
            ("tp2", {"embed": "vocabluary"}, '"vocabulary"'),
            ("tp8", None, r"tp8 for a model of 4 query heads.*tp4"),
        )
    ),
    # offload, activations and tiles
    *(
        (partial(engine_of, f"dp1 {word}", offload_folder=folder), said)
        for word in ("offload:optim@disk", "offload:param@disk")
        for folder, said in ((None, f"{word} without a folder"), ("/none", "which is not there"))
    ),
    (
        lambda: engine_of(
            "dp1 offload:optim@disk", optimizer=sw.Optim(torch.optim.Adagrad, lr=0.1)
        ),
        "Adagrad, whose state is made before the first step",
    ),
    (lambda: engine_of("dp1 offload:param tile:2", nn.Conv1d(2, 2, 1)), "without a linear layer"),
    (lambda: engine_of("dp1 activations:host"), "no class of modules repeats"),
    (lambda: engine_of("offload:auto device_memory:1MiB"), "shardwise predict"),
    # wrapped modules and optimizers
    *(
        (partial(sw.FSDP, nn.Linear(2, 2), **how), "cpu_offload=True")
        for how in (
            {"cpu_offload": "y"},
            {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True},
        )
    ),
    (
        lambda: sw.FSDP(made_in_inference(), world=alone()),
        r"weight is made under torch\.inference_mode",
    ),
    (lambda: sw.FSDP(nn.Linear(2, 2), shard_size=3, world=alone()), "divides the number of"),
    (
        lambda: sw.FSDP(nn.Linear(2, 2), "NO_SHARD", shard_size=2, world=alone()),
        'NO_SHARD with shard_size=2.*"HYBRID_SHARD"',
    ),
    (lambda: sw.DDP(part_first(), alone()), "wrapped already"),
    (lambda: sw.FSDP(part_later().get_submodule("0"), world=alone()), "wrapped already"),
    (lambda: sw.clip_grad_norm(part_first(), 1.0), "of which a part is wrapped"),
    (lambda: sw.no_sync(nn.Linear(1, 1)).__enter__(), "a wrapped module"),
    (lambda: sw.unwrap(nn.Linear(1, 1)), "not wrapped"),
    (
        lambda: sw.unwrap(nn.Sequential(sw.DDP(nn.Linear(1, 1), alone()))),
        r"has a part that is \(0\)",
    ),
    (lambda: sw.Lion(beta=0.9), r"sw\.Lion\(beta=0\.9\).*lr, betas, weight_decay"),  # type: ignore[call-arg]
    (lambda: sw.AdamW(lr=-1), r"sw\.AdamW\(lr=-1\).*Invalid learning rate"),
    (lambda: sw.SGD(lr="fast"), r"sw\.SGD\(lr='fast'\), which SGD refuses"),  # type: ignore[arg-type]
    (lambda: sw.SGD(lr=0.1, groups={"*": {"lr": -1}}), "Invalid learning rate: -1"),
    (lambda: sw.AdamW(groups={0: {"lr": 1.0}}), "a dict from patterns"),  # type: ignore[dict-item]
    (lambda: sw.AdamW(groups={"*": {"decay": 0}}), r"in the group '\*', which AdamW refuses"),
    (lambda: sw.AdamW(lr=True), r"which AdamW refuses \(lr=True in place of 0\.001\)"),
    (lambda: sw.SGD(weight_decay=math.nan), "which SGD refuses"),
    (lambda: sw.Muon(betas=(0.9, 0.9)), r"Write instead: sw\.Muon\(lr=3e-4\)"),  # type: ignore[call-arg]
    (lambda: sw.Optim(torch.optim.SGD, elementwise="yes"), "True or False"),  # type: ignore[arg-type]
    (lambda: sw.AdamW(3e-4), "groups=0.0003"),  # type: ignore[arg-type]
    (lambda: sw.Optim(3), r"sw\.Optim\(3\).*torch\.optim\.RMSprop"),  # type: ignore[arg-type]
    (
        lambda: sw.Optim(torch.optim.SGD([torch.zeros(1)], lr=0.5)),  # type: ignore[arg-type]
        r"sw\.Optim\(SGD.*a subclass of torch\.optim\.Optimizer",
    ),
    (lambda: sw.Optim(torch.optim.LBFGS), "computes the loss several times"),
    (lambda: sw.Optim(torch.optim.SparseAdam), "SparseAdam, which takes sparse gradients"),
    (
        lambda: sw.SGD({"*": sw.AdamW({"*.bias": {"lr": 0.1}})}, lr=0.1),
        "a specification without groups of its own",
    ),
    (
        lambda: sw.derive_table(
            nn.Sequential(nn.Linear(6, 6)), torch.ones(2, 6), 2, lambda m, x: m(x).sum()
        ),
        r"no layer can be sharded \(0 \(168 bytes\)",
    ),
    (
        lambda: sw.derive_table(nn.Linear(6, 6), torch.ones(2, 5), 2, lambda m, x: m(x).sum()),
        "a Linear whose forward pass gives RuntimeError: mat1",
    ),
    (
        lambda: sw.derive_table(nn.Linear(6, 6, device="meta"), torch.ones(2, 5), 2),
        "on the meta device gives",
    ),
    # models
    *(
        (partial(replace, CONFIG, **sizes), said)
        for sizes, said in (
            ({"heads": 3}, "a size that splits"),
            ({"kv_heads": 3}, "a divisor of heads"),
            ({"layers": 0}, "1 or more"),
        )
    ),
    *(
        (partial(find, f"moe:{word}"), "Allowed: ")
        for word in ("swtich", "switch:0.5", "switch:much")
    ),
    *(
        (partial(moe.tiny, text), r'Write instead: "topk:1\.25"')
        for text in ("topk:x", "topk:1:many", "topk:1:8:2:1")
    ),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_a_call_is_refused(call: Callable[[], Any], said: str):
    """In one paragraph, before a rank is started."""
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n\n" not in str(caught.value)


# --- plans ----------------------------------------------------------------------------------------

#: Plans that a small GPT cannot run under.
UNTIED = [
    # rows
    ("dp2 row:R,R", "'row:R,R'"),
    ("dp2 row:R,R,S0", "'row:R,R,S0'"),
    # context
    ("cp0", "Write instead: cp2, or cp4:2x2"),
    ("cp2:foo", "cpN, cpN:ulysses, or cpN:RxU with R * U = N"),
    ("cp2 | blocks.1: zero3", "'cp2' beside plans of single layers"),
    # recomputation
    ("recompute:blocks.1.mlpp", "Write instead: recompute:blocks.1.mlp"),
    ("recompute:selectiv", "Write instead: recompute:selective"),
    ("recompute:blocks", "where blocks matches no module"),
    ("recompute:partitioned", "Write instead: 'recompute:full', or tp2 beside it"),
    ("activations:disk", "Allowed: activations:host; without the word"),
    ("activations:host recompute:8GiB", "a budget of device memory, with 'activations:host'"),
    ("activations:host recompute:blocks,", "recompute:"),
    # arenas
    ("dp2 arenas", "with ddp and no recomputation"),
    ("dp2 zero3 recompute:1GiB arenas", "which chooses for each batch"),
    ("dp2 recompute:full activations:host arenas", "activations in host memory"),
    ("pp2 zero2 1f1b:4 arenas", "zero2 and no recomputation"),
    # offload
    ("dp2 zero2 offload:param", "'dp2 zero3 offload:param'"),
    ("dp2 row:R,R,S offload:param@disk", "'dp2 zero3 offload:param@disk'"),
    # tiles
    ("dp2 tile:4", "'dp2 zero3 tile:4'"),
    ("dp2 pp2 zero3 tile:4", "'pp2 dp2 zero3'"),
    ("dp2 tp2 zero3 tile:4", "'dp2 tp2 zero3'"),
    ("dp2 zero3 activations:host tile:4", "'dp2 zero3 activations:host'"),
    ("offload:param tile:2=nothing", "nothing matches no linear layer"),
    ("offload:param tile:38=head", "tile:37"),
    # experts
    ("dp4 ep2", "sw.MoE"),
    # stages
    ("dp2 stages:1,1", "'stages:1,1' without a pipeline"),
    ("pp2 stages:", "Write instead: stages:9,8,8,7"),
    ("pp2 stages:1,1,1", "3 numbers, with '1f1b:4' on 2 ranks, which has 2 stages"),
    ("pp2 interleaved:2x2 stages:1,1", "Write instead: 'pp2 interleaved:2x2'"),
    ("pp2 stages:2,1", "whose sum is 3, for a GPT that 2 stages divide into 2 pieces (blocks.0"),
    (
        "pp3 stages:2,1,1",
        "(embed, blocks.0, blocks.1, norm, head). Allowed: numbers whose sum is 5",
    ),
    ("pp6 stages:1,1,1,1,1,1", "at most as many stages as layers"),
    # layers
    ("dp2 | emb: zero1", "Write instead: 'embed: zero1'"),
    ("dp2 | blocks.0-99: zero1", "which do not all match a module of the GPT"),
    ("dp4 | blocks.1-9: tp2", "the layers blocks.1-9 in the plan"),
    ("dp4 | embed,blocks.1-9: tp2", "Write instead: 'blocks.1: tp2'"),
    ("dp2 | blocks: tp2 | blocks.0: zero1", "all have an earlier plan"),
    ("dp2 | blocks.0.mlp: tp2 | blocks.0: zero1", "is inside of the other"),
    ("dp2 recompute:full | blocks.0.mlp: tp2", "contains the layer blocks.0.mlp"),
    ("dp4 | blocks.0: tp4", "heads"),
    ("dp4 | embed", "names of layers, a colon, a space and plan words"),
    ("dp4 | embed: pp2 zero3", "'pp2' in the plan of the layers embed"),
    ("dp4 | embed: zeroo3", "zero3 for 'zeroo3'"),
    ("dp4 | blocks.3-1: tp2", "blocks.1-2"),
]
#: The same of the model whose head is the embedding.
TIED = [
    ("dp2 | head: tp2", "'embed,head: tp2'"),
    ("offload:param tile:2=head", "another module"),
    ("pp2 pipedream:4", "embed.weight is in stages 0 and 1, which update"),
]
ROWS = [
    *((small_gpt, plan, said) for plan, said in UNTIED),
    *((tied_gpt, plan, said) for plan, said in TIED),
]


@pytest.mark.parametrize(("make", "plan", "said"), ROWS)
def test_a_plan_is_refused(make: Any, plan: str, said: str):
    """In one paragraph, before the model is changed."""
    model = make()
    with pytest.raises(InputError) as caught:
        sw.parallelize(model, plan, traced(0, ranks_of(plan)), loss=gpt.loss)
    assert said in str(caught.value)
    assert "\n\n" not in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())
    assert [p.shape for p in model.parameters()] == [p.shape for p in make().parameters()]
