"""Models by the names used on the command line."""

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.suggest import suggest
from shardwise.models import decoder, gpt, hf, moe, user
from shardwise.models.gpt import SIZES, GPTConfig
from shardwise.models.initial import fill, initial
from shardwise.models.moe import MoEConfig
from shardwise.models.pretrained import FolderConfig
from shardwise.models.published import PUBLISHED
from shardwise.models.trainable import Trainable

#: Rows of a first pass, on which clusters of tokens are fitted.
FIRST_PASS: Final = 8
FORMS: Final = (
    f"gpt, gpt:SIZE, {', '.join(PUBLISHED)}, moe, moe:GATE[:CAPACITY], hf:NAME, hf:./FOLDER or "
    "file.py:build"
)


def find(name: str | Trainable, seed: int = 0) -> Trainable:
    """The model called `name`: `gpt` (size tiny), `llama:70b`, `moe`, `hf:llama`, `net.py:build`.

    `hf:` takes any model type of transformers or a folder of one, `file.py:function` the user's own
    model. Nothing is built yet, except by the user's file. A `Trainable` is returned unchanged.
    Raises InputError for another name, with the nearest.
    """
    if isinstance(name, Trainable):
        return name
    kind, _, rest = name.partition(":")
    if name in PUBLISHED:
        return of_sizes(name, PUBLISHED[name], seed)
    if kind == "gpt":
        return of_gpt(name, _size(rest or "tiny"), seed)
    if kind == "moe":
        return of_moe(name, moe.tiny(rest or "topk-renormalised"), seed)
    if kind == "hf":
        return hf.find(rest, seed)
    if ".py" in name:
        return user.find(name, seed)
    known = ["gpt", *(f"gpt:{s}" for s in SIZES), *PUBLISHED, "moe", "hf:gpt2", "hf:llama"]
    raise bad(f'the model "{name}"', FORMS, suggest(name, known, 0.5) or "gpt")


def of_sizes(name: str, sizes: decoder.Sizes, seed: int = 0) -> Trainable:
    """The decoder of these sizes, with random tokens as its batches.

    It can be sent to another process. The weights of a folder are read when it is built.
    """
    if isinstance(sizes, GPTConfig):
        return of_gpt(name, sizes, seed)
    if isinstance(sizes, MoEConfig):
        return of_moe(name, sizes, seed)
    make, make_batch = partial(decoder.build, sizes), partial(_texts, sizes)
    return Trainable(name, make, decoder.loss_of(sizes), make_batch, gpt.tokens, on_meta=True)


def of_gpt(name: str, config: GPTConfig, seed: int = 0) -> Trainable:
    """The GPT of a configuration, with random tokens as its batches."""
    make = partial(_filled, config, seed)
    return Trainable(name, make, gpt.loss, partial(_texts, config), gpt.tokens, initial)


def of_moe(name: str, config: MoEConfig, seed: int = 0) -> Trainable:
    """The MoE GPT of a configuration, with random tokens as its batches."""
    make, make_batch = partial(_filled, config, seed), partial(_moe_batch, config)
    if config.gate.name != "cluster":
        return Trainable(name, make, moe.loss, make_batch, gpt.tokens, initial)
    return Trainable(name, partial(_fitted, config, seed), moe.loss, make_batch, gpt.tokens)


def _filled(sizes: decoder.Sizes, seed: int) -> nn.Module:
    """The decoder; unless it is on meta, filled from the seed."""
    model = decoder.build(sizes)
    if not next(model.parameters()).is_meta:
        fill(model, seed)
    return model


def _fitted(config: MoEConfig, seed: int) -> nn.Module:
    """The model, with clusters of the tokens of a first pass."""
    model = _filled(config, seed)
    if not next(model.parameters()).is_meta:
        moe.fit_clusters(model, _moe_batch(config, FIRST_PASS, seed)["inputs"])
    return model


def _texts(sizes: GPTConfig | FolderConfig, rows: int, seed: int) -> dict[str, Tensor]:
    return random_text(rows, sizes.sequence, sizes.vocabulary, seed)


def _moe_batch(config: MoEConfig, rows: int, seed: int) -> dict[str, Tensor]:
    return moe.batch(rows, config, seed)


def random_text(rows: int, positions: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Uniform random tokens: `inputs` [rows, positions], and `targets`, the tokens one later."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocabulary, (rows, positions + 1), generator=generator)
    return {"inputs": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _size(word: str) -> GPTConfig:
    if word not in SIZES:
        known = [*SIZES, *(name[4:] for name in PUBLISHED if name.startswith("gpt:"))]
        raise bad(
            f'the model "gpt:{word}"',
            f"the sizes {', '.join(known)}",
            f"gpt:{suggest(word, known)}",
        )
    return SIZES[word]
