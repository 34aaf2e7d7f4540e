"""Models written by hand, without a table: what is derived for them must hold."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.cases import settled

WIDTH, HEADS, HEAD, WORDS, POSITIONS = 12, 4, 3, 31, 6


class Attention(nn.Module):
    """Queries, keys and values of separate layers, with the heads read from attributes."""

    def __init__(self, keys: int = HEADS) -> None:
        super().__init__()
        self.heads, self.keys = HEADS, keys
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * HEAD), nn.Linear(WIDTH, keys * HEAD)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        seen = x if seen is None else seen
        q = self.q(x).view(*x.shape[:2], self.heads, HEAD).transpose(1, 2)
        k, v = (
            layer(seen).view(*seen.shape[:2], self.keys, HEAD).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        mixed = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A pair of layers around a feature-by-feature function."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.between = between or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Shifted(nn.Module):
    """Adds a constant of one value and of a fixed length."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + torch.ones(20, dtype=x.dtype)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * self.scale


class Words(nn.Module):
    """An embedding, a body, and a head of the same weight or of its own."""

    def __init__(self, *body: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Sequential(*body)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).relu().transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class EncoderDecoder(nn.Module):
    """A decoder that attends to an encoder of the reversed positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Residual(Attention()), FeedForward())
        self.own, self.cross, self.after = Residual(Attention()), Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        return self.after(y + self.cross(y, self.encoder(x.flip(1))))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def batch(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (rows, POSITIONS + 1), generator=generator)


def convolution():
    return Words(Convolution(), FeedForward()), loss, batch


def recurrent():
    return Words(Recurrent(), FeedForward()), loss, batch


def encoder_decoder():
    return Words(EncoderDecoder()), loss, batch


def packed():
    return settled(Words(Residual(Packed()), FeedForward())), loss, batch


def tied():
    return Words(FeedForward(), tied=True), loss, batch


def shifted():
    return Words(FeedForward(Shifted()), FeedForward()), loss, batch


def one_key():
    """Heads that share one key and one value: no rank may hold a part of the queries alone."""
    return Words(Residual(Attention(1))), loss, batch


def scaled():
    return Words(FeedForward(Scaled())), loss, batch


def chain():
    """Five layers in a row: pairs, and one that is left over; no cross-entropy."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
