"""In 16 bits: the update of a step, made again by torch's optimizer from the gradients it used.

    run       gradient in 16 bits ---> in 32 bits, unscaled ---> optimizer on the 32-bit master
    replay                             the same numbers     ---> a new optimizer on a copy of it

Gradients in 16 bits may differ from one process's by their rounding, which hides a second rounding
behind them. The update is in 32 bits: both results are equal but for the last digits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.state.box import Box
from shardwise.verify.finding import NEVER, Errors
from shardwise.verify.oracles.oracles import optimizer_of

#: Errors that are allowed, relative to the largest value and to the largest change.
OF_VALUE: Final = 4 * torch.finfo(torch.float32).eps
OF_CHANGE: Final = 1e-5

#: A tensor's part on this rank: its name and its place.
Place = tuple[str, tuple[int, ...]]


@dataclass
class Replay:
    """The next update of `engine`; `start` are its weights and the optimizer's state before."""

    engine: Engine
    start: dict[Place, Tensor]
    gradients: dict[Place, Tensor]

    @classmethod
    def before(cls, engine: Engine) -> "Replay":
        return cls(engine, _copies(engine.boxes()), {})

    def take_gradients(self) -> None:
        """After the step. Parameters without a gradient are not updated."""
        flats = [flat for flat in self.engine.flats if flat.trained]
        pairs = (pair for f in flats for pair in zip(f.names, f.grads.used, strict=True))
        used = {f"grad/{name}" for name, has in pairs if has}
        self.gradients = _copies([b for b in self.engine.gradients() if b.name in used])

    def errors(self) -> Errors:
        """The update made again, beside that of the engine."""
        found = _copies(self.engine.boxes())
        optimizer, errors = self.engine.optimizer, dict[str, float]()
        factor = optimizer.lr / optimizer.spec.options["lr"]
        for places in _once_each(self.gradients):
            params = {name: self._parameter(name, place) for name, place in places.items()}
            made = optimizer_of(optimizer.spec)(params)
            for group in made.param_groups:
                group["lr"] *= factor
            for name, p in params.items():
                made.state[p] = self._state(name, places[name])
            made.step()
            for name, p in params.items():
                expected = {("model/" + name, places[name]): p.detach()}
                for key, value in made.state[p].items():
                    offsets = places[name] if value.dim() else ()
                    expected[f"optim/{key}/{name}", offsets] = value
                for place, value in expected.items():
                    error = _error(value, found[place], self.start.get(place))
                    errors[place[0]] = max(errors.get(place[0], 0.0), error)
        return Errors("update", tuple(errors), tuple(errors.values()))

    def _parameter(self, name: str, offsets: tuple[int, ...]) -> nn.Parameter:
        p = nn.Parameter(self.start["model/" + name, offsets].clone())
        p.grad = self.gradients["grad/" + name, offsets].to(p.dtype)
        return p

    def _state(self, name: str, offsets: tuple[int, ...]) -> dict[str, Tensor]:
        """Tensors of the part's shape, and numbers of the whole parameter."""
        state: dict[str, Tensor] = {}
        for (key, at), value in self.start.items():
            kind, _, rest = key.partition("/")
            word, _, of = rest.partition("/")
            if kind == "optim" and of == name and at in (offsets, ()):
                state[word] = value.clone()
        return state


def published(engine: Engine) -> Errors:
    """Whether flat parameters in 16 bits are their rounded masters; `boxes()` finished updates."""
    flats, facts = engine.optimizer.flats, dict[str, bool]()
    for k, master in engine.optimizer.masters.items():
        rounded, found = master.to(flats[k].dtype), flats[k].shard
        facts[f"{flats[k].names[0]} in 16 bits"] = torch.equal(rounded.to(found.device), found)
    return Errors.of_facts("update", facts)


def _copies(boxes: Sequence[Box]) -> dict[Place, Tensor]:
    return {(box.name, tuple(box.offsets)): box.tensor.detach().clone() for box in boxes}


def _once_each(gradients: Mapping[Place, Tensor]) -> list[dict[str, tuple[int, ...]]]:
    """The places by parameter, in as many lists as one parameter has places on this rank."""
    found: list[dict[str, tuple[int, ...]]] = []
    for key, offsets in gradients:
        name = key.removeprefix("grad/")
        free = next((places for places in found if name not in places), None)
        if free is None:
            found.append(free := {})
        free[name] = offsets
    return found


def _error(expected: Tensor, found: Tensor, start: Tensor | None) -> float:
    """0 if the update is the expected one, else NEVER."""
    if not found.numel():
        return 0.0
    expected, found = expected.double(), found.double()
    change = expected if start is None else expected - start.double()
    allowed = OF_VALUE * expected.abs().max() + OF_CHANGE * change.abs().max()
    return 0.0 if bool((found - expected).abs().max() <= allowed) else NEVER
