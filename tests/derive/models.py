"""Models written by hand, without a table: what is derived for them must hold."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, WORDS, POSITIONS = 12, 4, 31, 6


class Attention(nn.Module):
    """Queries, keys and values of separate layers, with the heads read from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        seen = x if seen is None else seen

        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.heads, WIDTH // HEADS).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(seen)), split(self.v(seen))
        mixed = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """One layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A pair of layers around a feature-by-feature function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Words(nn.Module):
    """An embedding, a body, and a head of the same weight or of its own."""

    def __init__(self, body: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), body
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


class Residual(nn.Module):
    """Adds what its module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Convolution(nn.Module):
    """A convolution over the positions, before a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.after = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(x.transpose(1, 2)).relu().transpose(1, 2))


class Recurrent(nn.Module):
    """A recurrent layer, before a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.after = nn.GRU(WIDTH, WIDTH, batch_first=True), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.cell(x)[0])


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
    return Words(Convolution()), loss, batch


def recurrent():
    return Words(Recurrent()), loss, batch


def encoder_decoder():
    return Words(EncoderDecoder()), loss, batch


def packed():
    return Words(nn.Sequential(Residual(Packed()), FeedForward())), loss, batch


def tied():
    return Words(FeedForward(), tied=True), loss, batch


def chain():
    """Five layers in a row: pairs, and one that is left over; no cross-entropy."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def shifted():
    """A constant of one value and of a fixed length is added between a pair of layers."""
    return Words(nn.Sequential(Residual(Shifted()), FeedForward())), loss, batch


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() + torch.ones(20, dtype=x.dtype))


def one_key():
    """Heads that share one key and one value: no rank may hold a part of the queries alone."""
    return Words(Residual(OneKey())), loss, batch


class OneKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (-1, 3)).transpose(1, 2)
        scores = q @ self.k(x).unsqueeze(1).transpose(2, 3)
        return self.out((scores.softmax(-1) @ self.v(x).unsqueeze(1)).transpose(1, 2).flatten(2))


def scaled():
    """A feature that a whole gate multiplies, and a scale of each feature."""
    return Words(Residual(Scaled())), loss, batch


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.scale, self.gate = nn.Parameter(torch.ones(20)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale * self.gate(x).sigmoid())
