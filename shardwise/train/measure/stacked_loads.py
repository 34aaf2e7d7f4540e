"""Loads of mixtures of transformers in a run: hooks count what routers chose in a training step.

    router ── logits [N, E] ──> entropy          experts ── chosen [N, K] ──> choices by expert

Each rank counts its own tokens, on the device, and after the step the ranks add them up. So loads
are those of the global batch under any plan; the library drops no choice. Tensor ranks have equal
tokens, except under `sp`: then each counts its shard of the sequence, without padding.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.objects import all_gather_object
from shardwise.engine.engine import Engine
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.expert.global_batch import phase
from shardwise.techniques.expert.moe_layer import Load
from shardwise.techniques.expert.stacked import experts_of, router_beside
from shardwise.techniques.tensor.tensor_state import Tensors


class StackedLoads:
    """Counts the choices of the modules `names` of an engine's model, of none without names.

    `choices` has by layer the numbers of choices by expert [E], `entropies` the sum over tokens and
    their number, and `shards` the positions of the sequence in the layer's last input.
    """

    def __init__(self, engine: Engine, names: Collection[str]) -> None:
        self.engine, self.names = engine, tuple(names)
        self.choices: dict[str, Tensor] = {}
        self.entropies: dict[str, Tensor] = {}
        self.shards: dict[str, int] = {}
        for name in self.names:
            module = engine.model.get_submodule(name)
            block = engine.model.get_submodule(name.rpartition(".")[0])
            block.register_forward_pre_hook(partial(self._note_sequence_shard, name))
            module.register_forward_pre_hook(partial(self._count_choices, name))
            router = router_beside(engine.model, name)
            if router is not None:
                router.register_forward_hook(partial(self._add_entropy, name, experts_of(module)))

    def take(self) -> dict[str, Load]:
        """The loads of the step, by layer, the same on every rank. Called by all ranks."""
        if not self.names:
            return {}
        found: dict[str, list[float]] = {}
        for own in all_gather_object(self._sums_of_rank(), self.engine.world):
            for name, numbers in own.items():
                before = found.get(name, [0] * len(numbers))
                found[name] = [a + b for a, b in zip(before, numbers, strict=True)]
        self.choices.clear()
        self.entropies.clear()
        return {name: _load(*numbers) for name, numbers in found.items()}

    def _sums_of_rank(self) -> dict[str, list[float]]:
        """What this rank adds to the sums: nothing if another one has the same tokens.

        By layer the sum of the entropies, the tokens, and the choices by expert.
        """
        if self.engine.sharded.tensor.rank and not self.engine.plan.sp:
            return {}
        none = torch.zeros(2)
        return {
            name: self.entropies.get(name, none).tolist() + counts.tolist()
            for name, counts in self.choices.items()
        }

    def _is_counted(self) -> bool:
        """Whether the pass is one of training, over rows of the batch, and no recomputation."""
        absent = self.engine.sharded.of(ExpertLayout).absent
        return torch.is_grad_enabled() and phase() == "forward" and not absent

    @torch.no_grad()
    def _add(self, sums: dict[str, Tensor], name: str, value: Tensor) -> None:
        sums[name] = value if name not in sums else sums[name] + value

    def _note_sequence_shard(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        """The block of experts has the input [B, T, D]."""
        if args and isinstance(args[0], Tensor) and args[0].dim() > 2:
            self.shards[name] = args[0].shape[-2]

    def _without_padding(self, name: str, x: Tensor) -> Tensor:
        """Those of `x` [N, ...] that are tokens; shards of a sequence are padded to one size."""
        tensors, size = self.engine.sharded.of(Tensors), self.shards.get(name)
        if not self.engine.plan.sp or size is None:
            return x
        length = tensors.stream.lengths.known.get(size, size * tensors.axis.size)
        own = min(max(length - tensors.axis.rank * size, 0), size)
        return x.unflatten(0, (-1, size))[:, :own].flatten(0, 1)

    def _count_choices(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_counted():
            chosen = self._without_padding(name, args[1])
            counts = torch.bincount(chosen.flatten(), minlength=experts_of(module))
            self._add(self.choices, name, counts)

    def _add_entropy(self, name: str, experts: int, _: nn.Module, args: Any, made: Any) -> None:
        logits = made[0] if isinstance(made, tuple) else made
        if self._is_counted() and isinstance(logits, Tensor) and logits.shape[-1] == experts:
            own = self._without_padding(name, logits.detach().flatten(0, -2))
            self._add(self.entropies, name, _entropy(own.double()))


def _entropy(logits_NE: Tensor) -> Tensor:
    """The sum of the entropies of the tokens' probabilities, and the number of tokens.

    Some routers (gemma4's) return probabilities in place of logits.
    """
    normal = (logits_NE >= 0).all() & ((logits_NE.sum(-1) - 1).abs() < 1e-3).all()
    probabilities = torch.where(normal, logits_NE, logits_NE.softmax(-1))
    summed = torch.special.entr(probabilities).sum()
    return torch.stack([summed, summed.new_tensor(len(logits_NE))])


def _load(entropies: float, tokens: float, *counts: float) -> Load:
    choices = tuple(map(int, counts))
    return Load(choices, choices, 0, int(tokens), entropies / max(1.0, tokens))
