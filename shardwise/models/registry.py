"""Models by the names used on the command line."""

from functools import partial
from typing import Final

from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest
from shardwise.models import decoder, gpt, hf, moe, user
from shardwise.models.gpt import SIZES, GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.models.pretrained import PUBLISHED
from shardwise.models.trainable import Trainable, fill, initial
from shardwise.models.user import UserConfig

NAMED: Final = {"gpt": SIZES["tiny"], **{f"gpt:{n}": s for n, s in SIZES.items()}, **PUBLISHED}
FORMS: Final = f"{', '.join(NAMED)}, moe:GATE[:CAPACITY], hf:NAME, hf:./FOLDER or file.py:build"


def find(name: str | Trainable, seed: int = 0) -> Trainable:
    """The model called `name`: `gpt` (size tiny), `llama:70b`, `moe`, `hf:llama`, `net.py:build`.
    Nothing is built yet, except by the user's file.  A `Trainable` is returned unchanged.
    Raises InputError for another name, with the nearest.
    """
    if isinstance(name, Trainable):
        return name
    if sizes := named_sizes(name):
        return of_sizes(name, sizes, seed)
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return hf.find(rest, seed)
    if ".py" in name:
        return user.find(name, seed)
    raise bad(f'the model "{name}"', FORMS, nearest(name))


def named_sizes(name: str) -> GPTConfig | MoEConfig | None:
    """The sizes of `gpt`, `gpt:SIZE`, `llama:70b` and others, `moe:GATE`; None for other names."""
    kind, _, rest = name.partition(":")
    if kind == "moe":
        return moe.tiny(rest or "topk-renormalised")
    return NAMED.get(name)


def nearest(name: str) -> str:
    return suggest(name, [*NAMED, "moe", "hf:gpt2", "hf:llama"], 0.5) or "gpt"


def of_sizes(name: str, sizes: decoder.Sizes, seed: int = 0) -> Trainable:
    """The decoder of these sizes, with random tokens as batches; it can be sent to processes.
    The weights of a folder are read when it is built, and a user's model is made with its weights.
    """
    if isinstance(sizes, GPTConfig):
        return of_gpt(name, sizes, seed)
    if isinstance(sizes, MoEConfig):
        return of_moe(name, sizes, seed)
    make, make_batch = partial(decoder.build, sizes), partial(_texts, sizes)
    on_meta = not isinstance(sizes, UserConfig)
    return Trainable(name, make, decoder.loss_of(sizes), make_batch, gpt.tokens, on_meta=on_meta)


def of_gpt(name: str, config: GPTConfig, seed: int = 0) -> Trainable:
    make = partial(_filled, config, seed)
    return Trainable(name, make, gpt.loss, partial(_texts, config), gpt.tokens, initial)


def of_moe(name: str, config: MoEConfig, seed: int = 0) -> Trainable:
    make, make_batch = partial(_filled, config, seed), partial(_moe_batch, config)
    return Trainable(name, make, moe.loss, make_batch, gpt.tokens, initial)


def _filled(sizes: decoder.Sizes, seed: int) -> nn.Module:
    model = decoder.build(sizes)
    if not next(model.parameters()).is_meta:
        fill(model, seed)
    return model


def _texts(sizes: decoder.Sizes, rows: int, seed: int) -> dict[str, Tensor]:
    return gpt.random_text(rows, sizes.sequence, sizes.vocabulary, seed)


def _moe_batch(config: MoEConfig, rows: int, seed: int) -> dict[str, Tensor]:
    return moe.batch(rows, config, seed)
