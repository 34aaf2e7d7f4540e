"""Styles: the words of a tensor-parallel table, and the kinds of modules they apply to.

Two consecutive linear layers need one all-reduce if the first is sharded by columns (`colwise`) and
the second by rows (`rowwise`) (arXiv 1909.08053, section 3). Norms and residuals on shards of the
sequence are described in arXiv 2205.05198, section 4.
"""

import re
from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import bad
from shardwise.core.tools.suggest import suggest

#: Every style and its meaning. N is a number from 2 up.
STYLES: dict[str, str] = {
    "colwise": "sharded by output features; the output is sharded",
    "colwise:heads": "as colwise, by whole query heads",
    "colwise:kv_heads": "as colwise, by whole key or value heads; ranks share a head if few",
    "colwise:qkv": "as colwise, for packed queries, keys and values, each by heads",
    "colwise:N": "as colwise, for N equal packed parts, each sharded",
    "rowwise": "sharded by input features; the input is sharded, the output summed",
    "rowwise:heads": "as rowwise, by whole query heads",
    "colwise_gather_output": "sharded by output features; the output is gathered",
    "rowwise_split_input": "sharded by input features; the input is replicated, the output summed",
    "vocabulary": "an embedding or the output layer, sharded by the vocabulary",
    "replicated": "replicated, used on sharded values: gradients are summed",
    "whole": "replicated; later patterns do not apply",
    "sequence": "replicated, used on shards of the sequence: gradients are summed",
    "gather": "its first argument is gathered along the sequence",
    "split": "each rank takes its shard of the sequence of its first argument",
    "vocabulary:sequence": "as vocabulary, for an embedding whose output is sharded by sequence",
    "vocabulary:whole": "as vocabulary, for an output layer whose input is gathered already",
    "sequence:join": "as sequence, and the output is gathered",
    "dropout": "a dropout on shards of the sequence",
}
#: The styles that only `sequence` entries have.
OF_SEQUENCE = (
    *("sequence", "sequence:join", "gather", "split"),
    *("vocabulary:sequence", "vocabulary:whole", "dropout"),
)


@dataclass(frozen=True)
class Style:
    """A style and its qualifier: "heads", "kv_heads", "qkv", "sequence", a number or nothing.

    `str` and `parse` are inverse: "colwise:heads" is Style("colwise", "heads").
    """

    name: str
    by: str = ""

    @classmethod
    def parse(cls, text: object) -> "Style":
        """Parse a style. Raises InputError that names the nearest style."""
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
        """Whether the style needs the number of heads."""
        return self.by in ("heads", "kv_heads", "qkv")

    @property
    def parts(self) -> int:
        """The number of equal parts packed in the sharded features."""
        return int(self.by) if self.by.isdigit() else 1


@dataclass(frozen=True)
class ModuleShape:
    """The properties of one module that a table uses.

    For an embedding, `in_features` is its number of rows and `out_features` its number of columns;
    for other modules, `in_features` is the length of their parameters, if these have one dim and
    one length. `transposed` weights are [in, out], as in Conv1D of transformers. `tied` names the
    earlier module with the same weight. `numbers` are its integer attributes; `parameters` says
    whether the module itself has parameters, and `own` has their names.
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
    """The name of the module that contains `name`; "" for the model itself."""
    return name.rpartition(".")[0]


def last(name: str) -> str:
    """The last part of `name`."""
    return name.rpartition(".")[2]
