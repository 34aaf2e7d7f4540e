"""Plans that cannot work, and the phrase in their one paragraph, on a rank that is traced.

A row is added here, not a test.
"""

from typing import Any

import pytest

import shardwise as sw
from shardwise.comm.world import traced
from shardwise.core.errors import InputError
from shardwise.models import gpt
from tests.engine.cases import ranks_of, small_gpt, tied_gpt

#: Plans that a small GPT cannot run under.
UNTIED = {
    "rows": [
        ("dp2 row:R,R", "'row:R,R'"),
        ("dp2 row:RRS", "'row:RRS'"),
        ("dp2 row:R,R,S0", "'row:R,R,S0'"),
        ("dp2 row:", "'row:'"),
        ("dp2 row:S,S,R", "'row:S,S,R'"),
    ],
    "context": [
        ("cp0", "Write instead: cp2, or cp4:2x2"),
        ("cp2:foo", "cpN, cpN:ulysses, or cpN:RxU with R * U = N"),
        ("cp4:3x2", "Write instead: cp6:3x2"),
        ("cp2 | blocks.1: zero3", "'cp2' beside plans of single layers"),
    ],
    "recomputation": [
        ("recompute:blocks.1.mlpp", "Write instead: recompute:blocks.1.mlp"),
        ("recompute:selectiv", "Write instead: recompute:selective"),
        ("recompute:blocks", "where blocks matches no module that has a forward"),
        ("recompute:partitioned", "Write instead: 'recompute:full', or tp2 beside it"),
        ("recompute:partitioned-host", "Write instead: 'recompute:full', or tp2 beside it"),
        ("activations:disk", "Allowed: activations:host; without the word"),
        ("activations:", "Write instead: activations:host"),
        ("activations:host recompute:8GiB", "a budget of device memory, with 'activations:host'"),
        ("activations:host recompute:blocks,", "recompute:"),
    ],
    "arenas": [
        ("dp2 arenas", "with ddp and no recomputation"),
        ("dp2 zero3 recompute:1GiB arenas", "which chooses for each batch"),
        ("dp2 recompute:full activations:host arenas", "activations in host memory"),
        ("pp2 zero2 1f1b:4 arenas", "zero2 and no recomputation"),
    ],
    "offload": [
        *((f"dp2 {row} offload:param", "'dp2 zero3 offload:param'") for row in ("zero1", "zero2")),
        ("dp2 row:R,R,S offload:param", "'dp2 zero3 offload:param'"),
        ("dp2 zero1 offload:param@disk", "'dp2 zero3 offload:param@disk'"),
        ("dp2 zero2 offload:param@disk", "'dp2 zero3 offload:param@disk'"),
        ("dp2 row:R,R,S offload:param@disk", "'dp2 zero3 offload:param@disk'"),
    ],
    "tiles": [
        ("dp2 tile:4", "'dp2 zero3 tile:4'"),
        ("dp2 zero2 tile:4", "'dp2 zero3 tile:4'"),
        ("dp2 pp2 zero3 tile:4", "'pp2 dp2 zero3'"),
        ("dp2 tp2 zero3 tile:4", "'dp2 tp2 zero3'"),
        ("dp2 zero3 activations:host tile:4", "'dp2 zero3 activations:host'"),
        ("offload:param tile:2=nothing", "nothing matches no linear layer"),
        ("offload:param tile:38=head", "tile:37"),
    ],
    "experts": [("dp4 ep2", "sw.MoE")],
    "stages": [
        ("dp2 stages:1,1", "'stages:1,1' without a pipeline"),
        ("pp2 stages:1,0", "'stages:1,0'"),
        ("pp2 stages:", "Write instead: stages:9,8,8,7"),
        ("pp2 stages:1,1,1", "3 numbers, with '1f1b:4' on 2 ranks, which has 2 stages"),
        ("pp2 interleaved:2x2 stages:1,1", "Write instead: 'pp2 interleaved:2x2'"),
        (
            "pp2 stages:2,1",
            "whose sum is 3, for a GPT that 2 stages divide into 2 pieces (blocks.0",
        ),
        (
            "pp3 stages:2,1,1",
            "(embed, blocks.0, blocks.1, norm, head). Allowed: numbers whose sum is 5",
        ),
        ("pp6 stages:1,1,1,1,1,1", "at most as many stages as layers"),
    ],
    "layers": [
        ("dp2 | emb: zero1", "Write instead: 'embed: zero1'"),
        ("dp2 | blocks.0-99: zero1", "which do not all match a module of the GPT"),
        ("dp4 | blocks.1-9: tp2", "the layers blocks.1-9 in the plan"),
        ("dp4 | blocks.0-9: tp2", "Write instead: 'blocks.0: tp2'"),
        ("dp4 | embed,blocks.1-9: tp2", "Write instead: 'blocks.1: tp2'"),
        ("dp2 | blocks: tp2 | blocks.0: zero1", "all have an earlier plan"),
        ("dp2 | blocks.0.mlp: tp2 | blocks.0: zero1", "is inside of the other"),
        ("dp2 recompute:full | blocks.0.mlp: tp2", "contains the layer blocks.0.mlp"),
        ("dp4 | blocks.0: tp4", "heads"),
    ],
}
#: The same of the model whose head is the embedding.
TIED = [
    ("dp2 | head: tp2", "'embed,head: tp2'"),
    ("offload:param tile:2=head", "another module"),
    ("pp2 pipedream:4", "embed.weight is in stages 0 and 1, which update"),
]
ROWS = [
    *((small_gpt, plan, said) for rows in UNTIED.values() for plan, said in rows),
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
