"""The sizes in a folder's config.json, checked against its weights before a model is made.

A model of transformers is built of as many modules as the file says: with -1 layers it has none,
without an error, and with 10^12 it is never ready.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shardwise.checkpoint.weights_folder import CONFIG, WeightsFolder
from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
#: Layers that a model may lack.
SOME_LAYERS: Final = ("num_decoder_layers", "encoder_layers", "decoder_layers")
HEADS: Final = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
WIDTHS: Final = (
    *("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embedding_size", "head_dim"),
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
)
#: A model without experts may have none.
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx")
MOST_POSITIONS: Final = 2**31
#: Without weights: more of a layer or of a dim than any published model has.
MOST_LAYERS: Final = 10_000
MOST_ROWS: Final = 2**24
#: Random text has none of the five special tokens (hf.py).
LEAST_VOCABULARY: Final = 6


def check_sizes(path: Path, said: dict[str, Any], weights: WeightsFolder) -> None:
    """Raise InputError for a size in config.json that no model with these weights has."""
    alone = not weights.names
    longest = MOST_ROWS if alone else weights.longest_dim()
    layers = MOST_LAYERS if alone else len(weights.names)
    why = "" if alone else ", which the weights beside it allow"
    limits = {
        "vocab_size": (LEAST_VOCABULARY, longest),
        **dict.fromkeys(LAYERS, (1, layers)),
        **dict.fromkeys(SOME_LAYERS, (0, layers)),
        **dict.fromkeys((*HEADS, *WIDTHS), (1, longest)),
        **dict.fromkeys(EXPERTS, (0, longest)),
        **dict.fromkeys(POSITIONS, (1, MOST_POSITIONS)),
    }
    for name, size in _sizes(said):
        least, most = limits.get(name, (None, None))
        if least is None or size is None:
            continue
        for one in size if isinstance(size, list) else [size]:
            if type(one) is not int or not least <= one <= most:
                raise bad(
                    f"{name} = {short_repr(size)} in '{path / CONFIG}'",
                    f"a whole number from {least} to {most}{why}",
                    "the configuration that the model was published or written with",
                )


def _sizes(said: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in said.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        else:
            yield name, value
