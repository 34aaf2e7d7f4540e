"""Models by the names used on the command line."""

from functools import partial
from typing import Final

from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import suggest
from shardwise.models import gpt, hf, moe, user
from shardwise.models.gpt import SIZES, GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.models.pretrained import PUBLISHED, FolderConfig
from shardwise.models.trainable import Trainable, fill, initial
from shardwise.models.user import UserConfig

#: What a decoder is built from: of the two in this package, of a folder, or of a user.
Sizes = GPTConfig | MoEConfig | FolderConfig | UserConfig
NAMED: Final = {"gpt": SIZES["tiny"], **{f"gpt:{n}": s for n, s in SIZES.items()}, **PUBLISHED}
FORMS: Final = (
    f"{', '.join(NAMED)}, moe:GATE[:CAPACITY], toy:TYPE, hf:./FOLDER, hf:ID or file.py:build"
)


def find(name: str | Trainable, seed: int = 0) -> Trainable:
    """The model called `name`: `gpt` (size tiny), `llama:70b`, `moe`, `toy:llama`, `net.py:build`.
    Nothing is built yet, except by the user's file.  A `Trainable` is returned unchanged.
    Raises InputError for another name, with the nearest.
    """
    if isinstance(name, Trainable):
        return name
    if sizes := named_sizes(name):
        return of_sizes(name, sizes, seed)
    kind, _, rest = name.partition(":")
    if kind == "toy":
        return hf.toy(rest, seed)
    if kind == "hf":
        return hf.find(rest)
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
    return suggest(name, [*NAMED, "moe", "toy:gpt2", "toy:llama"], 0.5) or "gpt"


def of_sizes(name: str, sizes: Sizes, seed: int = 0) -> Trainable:
    """The decoder of these sizes, with random tokens as batches; it can be sent to processes.
    The weights of a folder are read when it is built, and a user's model is made with its weights.
    """
    texts = partial(_texts, sizes)
    if isinstance(sizes, GPTConfig | MoEConfig):
        make = partial(_filled, sizes, seed)
        batches = partial(moe.batch, sizes) if isinstance(sizes, MoEConfig) else texts
        return Trainable(name, make, sizes.loss, batches, gpt.tokens, initial)
    on_meta = isinstance(sizes, FolderConfig)
    return Trainable(name, sizes.build, sizes.loss, texts, gpt.tokens, on_meta=on_meta)


def _texts(sizes: Sizes, rows: int, seed: int) -> dict[str, Tensor]:
    return gpt.random_text(rows, sizes.sequence, sizes.vocabulary, seed)


def _filled(sizes: Sizes, seed: int) -> nn.Module:
    model = sizes.build()
    if not next(model.parameters()).is_meta:
        fill(model, seed)
    return model
