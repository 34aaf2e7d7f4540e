"""Mixtures of experts as contenders: ours, a plain torch loop under DDP, and DeepSpeed's layer.

    dense           hidden width H: the GPT of the other suites
    experts E       E experts of width H / 2, two per token: the same operations, plus routers

All mixtures of 8 experts begin with the same weights, drop no token and have no auxiliary loss, so
they compute the same losses.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.contender import Contender, Loop, Setup, adamw, plain_loop
from benchmarks.contenders.deepspeed_peers import settings
from benchmarks.contenders.ours import engine_of, looped, planned
from shardwise.models import gpt, moe
from shardwise.models.trainable import fill
from shardwise.techniques.expert.gate import Gate
from shardwise.techniques.expert.moe_layer import Experts, MoE

#: Experts of the contenders that are compared with each other, and per token.
EXPERTS, CHOICES = 8, 2


def mixture(model: nn.Module, experts: int) -> moe.MoEGPT:
    """The GPT with so many experts in place of its feed-forward layers, at equal operations."""
    assert isinstance(model, gpt.GPT)
    config = replace(model.config, intermediate_size=model.config.intermediate_size // CHOICES)
    made = moe.MoEGPT(moe.MoEConfig(config, Gate("topk-renormalised", experts, CHOICES)))
    fill(made, seed=0)
    return made


def routed(experts: int, plan: str) -> Callable[[nn.Module, Setup], Loop]:
    """Our engine on a mixture of so many experts."""

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The engine's loop."""
        made = mixture(model, experts)
        return looped(engine_of(made, plan, replace(setup, loss=moe.loss)))

    return build


class LoopedExperts(nn.Module):
    """Each expert computes the tokens that chose it, one expert after the other; all are here."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        assert layer.router is not None
        self.router, self.experts = layer.router, layer.experts

    def forward(self, x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """From x [..., D] to y [..., D], without an auxiliary loss."""
        x_ND = x.flatten(0, -2)
        weights_NK, experts_NK = self.router(x_ND).softmax(-1).topk(CHOICES, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        y_ND = torch.zeros_like(x_ND)
        stacks = zip(self.experts.gate, self.experts.up, self.experts.down, strict=True)
        for expert, weights in enumerate(stacks):
            token, choice = torch.where(experts_NK == expert)
            made = _feed_forward(x_ND[token], *weights)
            y_ND = y_ND.index_add(0, token, made * weights_NK[token, choice, None])
        return y_ND.view_as(x), x.new_zeros(())


def _feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(inner, down)


def torch_loop(model: nn.Module, setup: Setup) -> Loop:
    """Every rank has all experts, as a layer in plain PyTorch under DDP."""
    made = mixture(model, EXPERTS)
    for block in made.blocks:
        assert isinstance(block, moe.MoEBlock)
        block.moe = LoopedExperts(block.moe)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = DistributedDataParallel(made)
    own = replace(setup, loss=moe.loss)
    return plain_loop(wrapped, adamw(wrapped.parameters()), own, drop=False)


class _Expert(nn.Module):
    """One expert as a module of its own, with the weights of a stack."""

    def __init__(self, stack: Experts, number: int) -> None:
        super().__init__()
        named = stack.named_parameters()
        self.weights = nn.ParameterDict({key: nn.Parameter(p[number].clone()) for key, p in named})

    def forward(self, x: Tensor) -> Tensor:
        """Rows [..., D] to [..., D]."""
        return _feed_forward(x, *(self.weights[key] for key in ("gate", "up", "down")))


class _DeepSpeedLayer(nn.Module):
    """DeepSpeed's layer with the weights of ours, dropless, without random choices."""

    def __init__(self, layer: MoE, width: int, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE as Theirs  # an optional peer

        assert layer.router is not None
        options = {"k": CHOICES, "drop_tokens": False, "top2_2nd_expert_sampling": False}
        made: Any = Theirs(
            width, _Expert(layer.experts, 0), num_experts=EXPERTS, ep_size=ranks, **options
        )
        own = made.deepspeed_moe
        own.gate.wg.weight.data.copy_(layer.router.weight.data)
        self.layer, self.stack = made, [layer.experts]

    def load(self, rank: int) -> None:
        """Give the experts of this rank their weights."""
        own: Any = self.layer.deepspeed_moe.experts.deepspeed_experts
        for index, expert in enumerate(own):
            number = rank * len(own) + index
            for key, p in self.stack[0].named_parameters():
                expert.weights[key].data.copy_(p.data[number])
        self.stack = []

    def forward(self, x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """From x [..., D] to y [..., D], without an auxiliary loss."""
        return self.layer(x)[0], x.new_zeros(())


def deepspeed_experts(model: nn.Module, setup: Setup) -> Loop:
    """DeepSpeed's engine without ZeRO, whose layer distributes the experts over all ranks."""
    import deepspeed as library  # an optional peer
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    made, rank = mixture(model, EXPERTS), torch.distributed.get_rank()
    library.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    for block in made.blocks:
        assert isinstance(block, moe.MoEBlock)
        layer = _DeepSpeedLayer(block.moe, made.config.gpt.hidden_size, setup.ranks)
        layer.load(rank)
        block.moe = layer  # pyright: ignore[reportAttributeAccessIssue]
    groups = split({"params": list(made.parameters()), "name": "parameters"})
    numel = sum(p.numel() for p in made.parameters())
    engine: Any
    engine, *_ = library.initialize(
        optimizer=adamw(groups), config=settings(0, numel), dist_init_required=False
    )

    def step(batch: dict[str, Tensor]) -> float:
        loss = moe.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Loop(step)


PEERS = (
    Contender("dense", "ddp", planned("dp{n}")),
    *(
        Contender(f"experts {experts}", "", routed(experts, "dp{n} ep{n}"))
        for experts in (EXPERTS, 4, 16, 64)
    ),
    Contender("experts 8 without ep", "", routed(EXPERTS, "dp{n}")),
    Contender("torch loop", "", torch_loop),
    Contender("DeepSpeed MoE", "", deepspeed_experts, package="deepspeed"),
)
