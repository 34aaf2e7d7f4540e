"""One word of a tensor-parallel table: what is done to a module, and to which kind.

Two linear layers in a row need one sum between ranks when the first is cut by its columns and the
second by its rows (arXiv 1909.08053, section 3); `colwise` and `rowwise` are those two. What norms
and residuals do on shards of the sequence is arXiv 2205.05198, section 4.
"""

import re
from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import bad
from shardwise.core.suggest import suggest

#: Every style as it is written, and what it does. N is a number from 2 up.
STYLES: dict[str, str] = {
    "colwise": "cut by output features; the result stays cut",
    "colwise:heads": "as colwise, by whole query heads",
    "colwise:kv_heads": "as colwise, by whole key or value heads; ranks share where there are few",
    "colwise:qkv": "as colwise, of queries, keys and values end to end, each by heads",
    "colwise:N": "as colwise, of N equal parts end to end, each cut",
    "rowwise": "cut by input features, which come cut; the result is summed",
    "rowwise:heads": "as rowwise, by whole query heads",
    "colwise_gather_output": "cut by output features; the result is gathered",
    "rowwise_split_input": "cut by input features, which come whole; the result is summed",
    "vocabulary": "an embedding, or the linear layer that makes the logits, cut by the vocabulary",
    "replicated": "whole, used on cut values: gradients are summed",
    "whole": "left as it is, whatever later patterns say",
    "sequence": "whole, used on shards of the sequence: gradients are summed",
    "gather": "shards of the sequence are gathered for its first argument",
    "split": "its first argument is whole, and each rank takes its shard of the sequence",
    "vocabulary:sequence": "as vocabulary, of an embedding whose result are shards of the sequence",
    "vocabulary:whole": "as vocabulary, of a linear layer whose input was joined before it",
    "sequence:join": "as sequence, and the result is the whole sequence again",
    "dropout": "a dropout on shards of the sequence",
}
#: The styles that only `sequence` entries have.
OF_SEQUENCE = (
    *("sequence", "sequence:join", "gather", "split"),
    *("vocabulary:sequence", "vocabulary:whole", "dropout"),
)


@dataclass(frozen=True)
class Style:
    """A style, and what it counts by: "heads", "kv_heads", "qkv", "sequence", a number or nothing.

    `str` and `parse` are inverse: "colwise:heads" is Style("colwise", "heads").
    """

    name: str
    by: str = ""

    @classmethod
    def parse(cls, text: object) -> "Style":
        """The style that `text` names. Raises InputError with the nearest one where none is."""
        known = isinstance(text, str) and (
            (text in STYLES and text != "colwise:N")
            or re.fullmatch(r"colwise:([2-9]|[1-9]\d+)", text, re.ASCII)
        )
        if not known:
            usable = [style for style in STYLES if style != "colwise:N"]
            near = suggest(str(text).lower(), usable)
            shown = f'"{text}"' if isinstance(text, str) else repr(text)
            raise bad(f"the style {shown}", ", ".join(STYLES), f'"{near}"')
        name, _, by = str(text).partition(":")
        return cls(name, by)

    def __str__(self) -> str:
        return f"{self.name}:{self.by}" if self.by else self.name

    @property
    def by_heads(self) -> bool:
        """Whether it needs to know how many heads there are."""
        return self.by in ("heads", "kv_heads", "qkv")

    @property
    def parts(self) -> int:
        """How many equal parts lie end to end in the features that it cuts."""
        return int(self.by) if self.by.isdigit() else 1


@dataclass(frozen=True)
class ModuleShape:
    """What a table needs to know of one module of a model.

    A linear layer has features in and out; an embedding has as many in as rows, and as many out as
    columns; of another module `in_features` is the length of its parameters, where they are of one
    dim and one length. `transposed` weights are [in, out], as Conv1D of transformers has them.
    `tied` names the module before it that holds the same weight. `numbers` are its attributes that
    are whole numbers; `parameters` says whether it holds any itself, `own` what they are called.
    """

    kind: Literal["linear", "embedding", "other"]
    in_features: int = 0
    out_features: int = 0
    bias: bool = False
    transposed: bool = False
    parameters: bool = True
    type_name: str = ""
    tied: str = ""
    numbers: tuple[tuple[str, int], ...] = ()
    own: tuple[str, ...] = ()


def general(name: str) -> str:
    """The name of a module as a pattern for all layers: "blocks.3.mlp.0" gives "blocks.*.mlp.0"."""
    return ".".join(
        ["*" if part.isdigit() else part for part in name.split(".")[:-1]] + [last(name)]
    )


def parent(name: str) -> str:
    """The module that `name` is in; "" for the model itself."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """What `name` is called in the module that it is in."""
    return name.rpartition(".")[2]
