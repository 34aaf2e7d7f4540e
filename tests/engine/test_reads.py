"""Texts that ranks generate end at different lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.world import World
from shardwise.models import hf as hf_models
from tests.pool import run_gloo


def generated(world: World, plan: str) -> tuple[Tensor, bool]:
    """This rank's own text, which ends early on one rank, and whether the model knows it is cut."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = hf_models.small_config("llama")
    model: Any = hf.LlamaForCausalLM(config)
    if world.size > 1:
        model = sw.FSDP(model, world=world) if plan == "FSDP" else _engine_model(model, plan, world)
    rows = []
    for rank in [world.rank] if world.size > 1 else [0, 1]:
        ids, ends = torch.tensor([[5, 7 + rank]]), {"max_new_tokens": 3 + 4 * rank}
        out = model.eval().generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **ends)
        rows.append(F.pad(out[0], (0, 9 - out.shape[1])))
    together = "_is_fsdp_managed_module" in vars(model)
    return torch.stack(rows), together


def _engine_model(model: nn.Module, plan: str, world: World) -> Any:
    return sw.parallelize(model, plan, world).model


@pytest.mark.parametrize("plan", ["FSDP", "dp2 zero3"])
def test_texts_of_ranks_end_at_different_lengths(plan: str) -> None:
    """`generate()` of transformers sees that ranks must run equally many passes."""
    [(expected, _)] = run_gloo(1, generated, plan)
    for rank, (row, together) in enumerate(run_gloo(2, generated, plan)):
        assert torch.equal(row[0], expected[rank])
        assert together
