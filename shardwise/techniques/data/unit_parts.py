"""Layers whose parameters are those of several units, which are gathered one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from shardwise.techniques.data.wrap_policy import UnitSpec


class UnitParts(Protocol):
    """How layers are divided (techniques/tile)."""

    @property
    def layers(self) -> Mapping[str, nn.Linear]:
        """The divided layers by name."""
        ...

    def divided(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The units, with one for each part in place of that of its layer."""
        ...

    def plain(self, name: str) -> str:
        """The name of the model's parameter of which the parameter `name` is a part."""
        ...

    def place(self, name: str, /) -> dict[str, int]:
        """The coordinate of the parameter `name` on the axis of parts."""
        ...

    def release(self, device: torch.device | None, /) -> None:
        """Free the parameters of the layers, whose values the parts have."""
        ...


@dataclass(frozen=True)
class WholeUnits:
    """No layer is divided: every method returns what it is given."""

    layers: Mapping[str, nn.Linear] = field(default_factory=dict[str, nn.Linear])

    def divided(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """All units."""
        return list(specs)

    def plain(self, name: str) -> str:
        """The name itself."""
        return name

    def place(self, _: str, /) -> dict[str, int]:
        """No coordinate."""
        return {}

    def release(self, _: torch.device | None, /) -> None:
        """Nothing to free."""
