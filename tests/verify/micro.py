"""Models so small that a proof takes a fraction of a second, with what mutations need of them.

gpt        two blocks, odd sizes, rows with different numbers of tokens; `deep`: four blocks
words      the same with two blocks and more words than a position has other numbers
tied       the same with one weight for the embedding and the logits
squared    the GPT with a loss that has a z-loss
layers     linear layers with biases, a frozen one among them, and running statistics
training   the layers, with a factor that they apply in training alone
spare      the layers, with a larger one that nothing uses
constant   the layers, with a buffer of a number that 16 bits do not have
wide       layers with tensors of several chunks of a disk
fused      layers whose two projections are the halves of one product
moe        the GPT with experts that drop tokens, and losses; `sigmoid`, `choice`: other gates
every      the same whose tokens go to every expert
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.models import gpt, moe
from shardwise.models.trainable import Trainable
from shardwise.techniques.expert.gate import Gate
from tests.engine.cases import settled

CONFIG = gpt.GPTConfig(
    vocabulary=7,
    layers=2,
    hidden_size=12,
    heads=2,
    kv_heads=2,
    intermediate_size=14,
    sequence=8,
    tied=False,
)
TIED = gpt.GPTConfig(**{**vars(CONFIG), "tied": True})
WIDTH, HIDDEN = 6, 9  # a block has an odd number of elements, and so padding


def reader(config: gpt.GPTConfig) -> nn.Module:
    return settled(gpt.GPT(config))


def text(rows: int, seed: int) -> dict[str, Tensor]:
    """Random words; a third of the targets do not count."""
    own = torch.Generator().manual_seed(seed)
    words = torch.randint(CONFIG.vocabulary, (rows, CONFIG.sequence + 1), generator=own)
    targets = words[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=own) < 1 / 3] = -100
    targets[:, 0] = words[:, 1]  # some of every row do
    return {"inputs": words[:, :-1].contiguous(), "targets": targets}


class Block(nn.Module):
    """Two linear layers around which the input goes, with a factor between them in training."""

    def __init__(self, factor: float, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.factor = factor
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return x + self.down(y * self.factor if self.training else y)


class Layers(nn.Module):
    """Four blocks, of which the second is frozen, after a norm of each row. The norm's running
    statistics are sent as any other's; they do not depend on the rows.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True, momentum=0.0)
        self.blocks = nn.Sequential(*(Block(factor) for _ in range(4)))
        self.blocks[1].requires_grad_(False)
        self.tensor_table = sw.Table.of({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.norm(x.unsqueeze(1)).squeeze(1))


class Wide(nn.Module):
    """Two blocks on inputs of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*(Block(1.0, 64, 65) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


class Kinks(nn.Module):
    """Layers between which the model's own forward clips; it returns a parameter beside, and
    multiplies by the first layer's weight once more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = self.layers
        y = third(second(first(x).relu()).relu())
        return functional.linear(y, first.get_parameter("weight")), self.log_variance


class Fused(nn.Module):
    """Two products in one, whose halves are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 256), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, -1)
        return x + self.down(first * second)


def mixture(gate: str, capacity: float | None, experts: int = 4) -> nn.Module:
    """A small GPT of experts with the same weights in every thread."""
    losses = {"balance": 0.1, "z": 0.01, "importance": 0.1}
    return settled(
        moe.MoEGPT(moe.MoEConfig(CONFIG, Gate(gate, experts, 2, capacity, 1.5, losses), 1))
    )


def layers(factor: float) -> nn.Module:
    return settled(Layers(factor))


def fused() -> nn.Module:
    """Two such blocks with the same weights in every thread."""
    return settled(nn.Sequential(OrderedDict(blocks=nn.Sequential(Fused(), Fused()))))


def vectors(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random inputs, and targets that follow from them."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.cumsum(1).sin()


def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out, log_variance = model(batch[0])
    decay = sum(p.square().sum() for p in model.get_submodule("layers").parameters())
    return (functional.mse_loss(out, batch[1]) / log_variance.exp() + log_variance + decay).sum()


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return sw.cross_entropy(model(batch["inputs"]), batch["targets"], z_loss=0.1)


def constant() -> nn.Module:
    """The layers with a buffer that nothing reads, a view."""
    model = layers(1.0)
    model.register_buffer("third", torch.tensor([1 / 3]).view(1, 1))
    return model


def spare() -> nn.Module:
    """The layers with another one that nothing uses."""
    model = layers(1.0)
    model.add_module("spare", nn.Linear(WIDTH, 99))
    return settled(model)


def _gpt(name: str, config: gpt.GPTConfig) -> Trainable:
    return Trainable(name, partial(reader, config), gpt.loss, text, gpt.tokens)


def _moe(name: str, gate: str, capacity: float | None = None, experts: int = 4) -> Trainable:
    return Trainable(name, partial(mixture, gate, capacity, experts), moe.loss, text, gpt.tokens)


MODELS: dict[str, Callable[[], Trainable]] = {
    "gpt": lambda: _gpt("gpt", CONFIG),
    "deep": lambda: _gpt("deep", replace(CONFIG, layers=4)),
    "words": lambda: _gpt("words", replace(CONFIG, vocabulary=96)),
    "tied": lambda: _gpt("tied", TIED),
    "squared": lambda: replace(_gpt("squared", CONFIG), loss=squared),
    "layers": lambda: Trainable("layers", partial(layers, 1.0), error, vectors),
    "wide": lambda: Trainable("wide", lambda: settled(Wide()), error, vectors),
    "fused": lambda: Trainable("fused", fused, error, vectors),
    "kinks": lambda: Trainable("kinks", lambda: settled(Kinks()), likelihood, vectors),
    "moe": lambda: _moe("moe", "topk-renormalised", 1.25),
    "sigmoid": lambda: _moe("sigmoid", "sigmoid"),
    "every": lambda: _moe("every", "topk", experts=2),
    "choice": lambda: _moe("choice", "expert-choice"),
    "constant": lambda: Trainable("constant", constant, error, vectors),
    "spare": lambda: Trainable("spare", spare, error, vectors),
    "training": lambda: Trainable("training", partial(layers, 0.7), error, vectors),
}


def find(name: str, seed: int = 0) -> Trainable:
    """The model of that name; in place of the registry's."""
    return MODELS[name]()
