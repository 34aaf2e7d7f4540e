"""Sabotages of mixtures of experts, in the layer that one process has too."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.techniques.expert import gate as gate_file
from shardwise.techniques.expert import gates, losses, routing
from shardwise.techniques.expert.gates import Choice
from shardwise.techniques.expert.moe_layer import MoE
from tests.verify.mutations.mutation import Mutation, Patch, around


def weights_of_all_experts_normalised(patch: Patch) -> None:
    """The k weights are divided by the sum of all E probabilities, which is 1."""
    around(
        patch,
        gates,
        "topk_softmax_before",
        lambda real, logits, k, **_: real(logits, k, normalised=False),
    )


def scale_of_the_weights_forgotten(patch: Patch) -> None:
    def route(real: Any, gate: Any, *args: Any, **how: Any) -> Any:
        return real(replace(gate, scale=1.0), *args, **how)

    around(patch, gate_file.Gate, "route", route)


def weights_without_a_gradient(patch: Patch) -> None:
    def choose(real: Any, *args: Any) -> Choice:
        found = real(*args)
        return replace(found, weights=found.weights.detach())

    around(patch, gate_file.Gate, "choose", choose)


def a_place_too_many(patch: Patch) -> None:
    around(
        patch,
        routing,
        "capacity_of",
        lambda real, *args: None if args[0] is None else real(*args) + 1,
    )


def balance_of_the_first_choices(patch: Patch) -> None:
    def choose(real: Any, *args: Any) -> Choice:
        return replace(real(*args), balance_choices=1)

    around(patch, gate_file.Gate, "choose", choose)


def variation_not_squared(patch: Patch) -> None:
    around(patch, losses, "squared_variation", lambda real, x: real(x).sqrt())


def bias_in_the_weights(patch: Patch) -> None:
    def sigmoid(real: Any, logits: Tensor, k: int, bias: Tensor) -> Choice:
        found = real(logits, k, bias)
        top = (logits.sigmoid() + bias.to(logits)).gather(-1, found.experts)
        return replace(found, weights=top / top.sum(-1, keepdim=True))

    around(patch, gates, "sigmoid", sigmoid)


def bias_the_wrong_way(patch: Patch) -> None:
    def forward(real: Any, layer: MoE, *args: Any) -> Any:
        layer.bias_rate = -abs(layer.bias_rate)
        return real(layer, *args)

    around(patch, MoE, "forward", forward)


def experts_choose_too_few(patch: Patch) -> None:
    around(
        patch,
        gates,
        "expert_choice",
        lambda real, scores, capacity: real(scores, max(1, capacity - 1)),
    )


def tokens_to_the_next_expert(patch: Patch) -> None:
    def choose(real: Any, gate: Any, *args: Any) -> Choice:
        found = real(gate, *args)
        return replace(found, experts=(found.experts + 1) % gate.experts)

    around(patch, gate_file.Gate, "choose", choose)


def one_token_to_the_next_expert(patch: Patch) -> None:
    def choose(real: Any, gate: Any, *args: Any) -> Choice:
        found = real(gate, *args)
        experts = found.experts.clone()
        experts[:1] = (experts[:1] + 1) % gate.experts
        return replace(found, experts=experts)

    around(patch, gate_file.Gate, "choose", choose)


#: In 16 bits the oracle follows the choices of the run.
IN_16_BITS = (
    Mutation("the next expert", "dp2 ep2 bf16", "parity", tokens_to_the_next_expert, "moe"),
    Mutation(
        "the next expert of one", "dp2 ep2 bf16", "parity", one_token_to_the_next_expert, "moe"
    ),
    Mutation("a capacity of one more, in bf16", "dp2 ep2 bf16", "parity", a_place_too_many, "moe"),
    Mutation(
        "a router without a gradient, in bf16",
        "dp2 ep2 bf16",
        "parity",
        weights_without_a_gradient,
        "moe",
    ),
)

MUTATIONS = (
    *IN_16_BITS,
    Mutation(
        "weights not normalised over k",
        "dp2 ep2",
        "parity",
        weights_of_all_experts_normalised,
        "moe",
    ),
    Mutation(
        "the scale of experts forgotten", "dp2", "parity", scale_of_the_weights_forgotten, "moe"
    ),
    Mutation("a router without a gradient", "dp2 ep2", "parity", weights_without_a_gradient, "moe"),
    Mutation("a capacity of one more", "dp2 ep2", "parity", a_place_too_many, "moe"),
    Mutation("a balance of first choices", "dp2", "parity", balance_of_the_first_choices, "moe"),
    Mutation("a variation not squared", "dp2", "parity", variation_not_squared, "moe"),
    Mutation("a bias in the weights", "dp2 ep2", "parity", bias_in_the_weights, "sigmoid"),
    Mutation("a bias the wrong way", "dp2", "parity", bias_the_wrong_way, "sigmoid"),
    Mutation("experts that choose too few", "dp2", "parity", experts_choose_too_few, "choice"),
)
