"""Models of `transformers`: small random ones (`toy:llama`), folders and the Hub's (`hf:./folder`).

Every model type of that library has a configuration class with defaults of the published size.  A
small model, of a few ten thousand parameters, is made by replacing the sizes in it, which are found
by their usual names.  Nothing is downloaded.  Dropout is 0, so that every plan can be proved.
"""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.checkpoint.weights_folder import CONFIG, GENERATION, open_model, open_weights
from shardwise.core.errors import InputError, bad
from shardwise.core.tools.arguments import suggestions
from shardwise.core.tools.hub import folder_of
from shardwise.models.gpt import IGNORED, cross_entropy, tokens
from shardwise.models.trainable import Loss, Trainable

VOCABULARY: Final = 128
POSITIONS: Final = 16
MASK: Final = 4
LONGEST: Final = 300  # characters of an error of transformers
FIRST_WORD: Final = 5  # smaller numbers are special tokens: padding, start, end, mask

#: The sizes of the small model, by their names in configurations.
SMALL: Final[dict[str, int]] = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size"),
        (64, "hidden_size d_model n_embd dim word_embed_proj_dim embedding_size hidden_dim"),
        (64, "max_position_embeddings n_positions max_seq_len n_ctx"),
        (2, "num_hidden_layers n_layer num_layers n_layers num_decoder_layers"),
        (2, "encoder_layers decoder_layers num_key_value_heads n_group num_expert_group"),
        (2, "num_experts_per_tok num_experts_per_token experts_per_token"),
        (4, "num_attention_heads n_head num_heads n_heads"),
        (4, "encoder_attention_heads decoder_attention_heads"),
        (4, "num_local_experts num_experts n_routed_experts"),
        (16, "head_dim d_kv query_pre_attn_scalar rotary_dim"),
        (16, "qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        (96, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim"),
        (48, "moe_intermediate_size shared_expert_intermediate_size"),
        (32, "q_lora_rank kv_lora_rank"),
        (1, "topk_group first_k_dense_replace bos_token_id cls_token_id"),
        (0, "pad_token_id decoder_start_token_id"),
        (2, "eos_token_id sep_token_id forced_eos_token_id"),
    )
    for name in names.split()
}


def toy(name: str, seed: int = 0) -> Trainable:
    """The small model of type `name`. Dropout is 0, tied embeddings stay tied, weights are the
    library's random ones of `seed`, and the loss is the type's.
    Raises InputError if transformers is not installed or has no such type (naming the nearest), and
    if no small model of the type can be made.
    """
    require_transformers(f"toy:{name}")
    if not name:
        raise bad('the model "toy:" without a type', "toy: and a type", "toy:gpt2 or toy:llama")
    kind = kind_of(name)
    return Trainable(f"toy:{name}", partial(_make, name, kind, seed), kind.loss, kind.batch, tokens)


def require_transformers(model: str) -> None:
    """Raise InputError unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise bad(
            f'the model "{model}", while transformers is not installed',
            "toy: and hf: models if the extra `hf` is installed",
            "pip install 'transformers>=4.46'",
        )


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy as gpt.loss; the batch may have `position_ids` [B, T] of several documents."""
    packed = {}
    if "position_ids" in batch:  # with a cache, documents are not kept apart
        packed = {"position_ids": batch["position_ids"], "use_cache": False}
    with Wide():
        logits = model(input_ids=batch["inputs"], **packed).logits
    return cross_entropy(logits, batch["targets"])


def seq2seq_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with Wide():
        out = model(input_ids=batch["inputs"], decoder_input_ids=batch["decoder_inputs"])
    return cross_entropy(out.logits, batch["targets"])


def causal_batch(rows: int, seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Random text, with the next token as target; rows have different lengths."""
    text, generator = _text(rows, seed, vocabulary)
    return {"inputs": text[:, :-1].contiguous(), "targets": _ragged(text[:, 1:].clone(), generator)}


def masked_batch(rows: int, seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Random text with a quarter of its tokens masked; the masked tokens are the targets."""
    text, generator = _text(rows, seed, vocabulary)
    hidden = torch.rand(text.shape, generator=generator) < 0.25
    hidden[:, 0] = True  # every row has at least one target
    return {"inputs": text.masked_fill(hidden, MASK), "targets": text.masked_fill(~hidden, IGNORED)}


def seq2seq_batch(rows: int, seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Two random texts: the encoder's and the decoder's."""
    read, _ = _text(rows, seed, vocabulary)
    write, generator = _text(rows, seed + 1_000_003, vocabulary)
    return {
        "inputs": read,
        "decoder_inputs": write[:, :-1].contiguous(),
        "targets": _ragged(write[:, 1:].clone(), generator),
    }


def _text(rows: int, seed: int, vocabulary: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, POSITIONS + 1)
    return torch.randint(FIRST_WORD, vocabulary, shape, generator=generator), generator


def _ragged(targets: Tensor, generator: torch.Generator) -> Tensor:
    """End each row somewhere in its second half, so that ranks have unequal numbers of tokens."""
    rows, positions = targets.shape
    end = torch.randint(positions // 2, positions + 1, (rows, 1), generator=generator)
    return targets.masked_fill(torch.arange(positions) >= end, IGNORED)


class Wide(TorchFunctionMode):
    """Keeps fp64 tensors in fp64, although the library's models cast norms and softmax to fp32.
    The cast is right for bf16 and harmless for fp32, but would limit a proof in fp64 to 1e-7.
    Grouped products of experts, which do not support fp64, are computed one by one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return first
        if func is Tensor.matmul and args[1].dtype is torch.float32:  # positions times frequencies
            return func(first, args[1].double())
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        if getattr(func, "__name__", "").removeprefix("_") == "grouped_mm":
            return _by_group(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _by_group(rows_NI: Tensor, stacked_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Grouped matrix products, which torch does not have in fp64: rows up to ends[e] times e.
    On the meta device ends have no values; then each group has equally many rows.
    """
    rows, experts = len(rows_NI), len(stacked_EIO)
    if ends_E.is_meta:
        lengths = [rows * (e + 1) // experts - rows * e // experts for e in range(experts)]
    else:
        lengths = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(rows_NI.split(lengths), stacked_EIO, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


class Kind(NamedTuple):
    """A kind of language model: the class of transformers that makes it, its loss and batches."""

    family: str
    table: str  # of its model types, in transformers
    loss: Loss
    batch: Callable[..., Any]


CAUSAL: Final = Kind("AutoModelForCausalLM", "CAUSAL_LM", causal_loss, causal_batch)
#: The kinds of a model type, of which the first one counts.
KINDS: Final = (
    Kind("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", seq2seq_loss, seq2seq_batch),
    Kind("AutoModelForMaskedLM", "MASKED_LM", causal_loss, masked_batch),
    CAUSAL,
)


def config_of(path: Path, *, dropout: bool = True) -> Any:
    """A folder's configuration, without its `dropout` if asked. Raises InputError."""
    require_transformers(f"hf:{path}")
    from transformers import AutoConfig  # the extra `hf`

    said = open_model(path).config or {}
    kind = said.get("model_type")
    if not isinstance(kind, str):
        raise bad(
            f"the folder '{path}' without {CONFIG} of a model of transformers",
            "a folder written by save_pretrained or 'shardwise checkpoint export'",
            "toy:gpt2 for a small model with random weights",
        )
    kind_of(kind)
    drop = {} if dropout else {k: 0.0 for k, v in said.items() if "drop" in k and v}
    with explained(path):
        return AutoConfig.from_pretrained(path, **drop)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Any error of transformers about a folder as an InputError of one paragraph."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each class has its own requirements
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"
        raise bad(
            f"the folder '{path}', of which transformers makes no model ({why})",
            "a folder written by save_pretrained or 'shardwise checkpoint export'",
            f"right values in '{path / CONFIG}', or the folder copied or exported again",
        ) from error


def load(path: Path, config: Any) -> Any:
    """The model of `config` with the folder's weights in fp32; on the meta device without them."""
    family = _family(kind_of(config.model_type))
    config.use_cache = False
    with _quiet(), explained(path):
        if torch.get_default_device().type == "meta":
            return _as_generates(family.from_config(config), path)
        open_weights(path)
        model, found = family.from_pretrained(
            path, config=config, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):
        raise bad(
            f"the folder '{path}', which lacks {len(missing)} weights of its {type(model).__name__}"
            f", the first {missing[0]}",
            "a folder with every weight of the model that its configuration names",
            "the folder written again by save_pretrained of that model",
        )
    return model


def _as_generates(model: Any, path: Path) -> Any:
    """The model with the folder's generation_config.json, which `from_config` does not read."""
    from transformers import GenerationConfig  # the extra `hf`

    if (path / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def find(name: str) -> Trainable:
    """The model in the folder `name`, or of this id of the Hub, without dropout; one of the Hub
    without its weights, unless a run has downloaded them. Without weights it is on meta.
    Raises InputError without transformers, and for a folder without a configuration.
    """
    require_transformers(f"hf:{name}")
    path = folder_of(name)
    config = config_of(path, dropout=False)
    kind = kind_of(config.model_type)
    with explained(path):
        text = getattr(config, "get_text_config", lambda: config)()
        batch = partial(kind.batch, vocabulary=min(VOCABULARY, text.vocab_size))
    make = partial(load, path, config)
    return Trainable(f"hf:{path}", make, kind.loss, batch, tokens, on_meta=True)


def kind_of(name: str) -> Kind:
    """The kind of the model type. Raises InputError if transformers has none of this name."""
    from transformers.models.auto import modeling_auto as auto  # the extra `hf`

    types = {kind: getattr(auto, f"MODEL_FOR_{kind.table}_MAPPING_NAMES") for kind in KINDS}
    for kind, names in types.items():
        if name in names:
            return kind
    close = suggestions(name, dict.fromkeys(chain.from_iterable(types.values())), 3)
    raise bad(
        f'the model "toy:{name}", for which transformers has no language model',
        f"a model type of transformers, such as {', '.join(close)}",
        f"toy:{close[0]}",
    )


def _make(name: str, kind: Kind, seed: int) -> nn.Module:
    family = _family(kind)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = family.from_config(small_config(name))
            with torch.no_grad():
                kind.loss(model, kind.batch(1, seed))
        except Exception as error:  # each configuration class has its own requirements
            raise bad(
                f'the model "toy:{name}", whose small configuration gives '
                f"{type(error).__name__}: {error}",
                "model types whose sizes have the usual names",
                "your own build() in a file, as file.py:build",
            ) from error
    return model


def _family(kind: Kind) -> Any:
    return getattr(importlib.import_module("transformers"), kind.family)


def small_config(name: str) -> Any:
    """The configuration of type `name` with the sizes of SMALL, no cache, and no dropout."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(name)
    every: dict[str, Any] = usual.to_dict()
    changes: dict[str, Any] = {
        k: SMALL[k] for k, x in every.items() if k in SMALL and x is not None
    }
    none = {k: 0.0 for k, x in every.items() if "drop" in k and isinstance(x, float)}
    none |= {"use_cache": False} if "use_cache" in every else {}
    heads = getattr(usual, "num_attention_heads", None)
    if heads is not None and heads == getattr(usual, "num_key_value_heads", None):
        changes["num_key_value_heads"] = SMALL["num_attention_heads"]
    # "eager": experts one by one, since grouped matrix products do not support fp64
    return AutoConfig.for_model(name, experts_implementation="eager", **none, **changes)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
