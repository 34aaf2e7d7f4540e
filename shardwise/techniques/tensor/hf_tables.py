"""Tables for models of transformers: converted from their configuration, or written here.

A configuration of that library contains `base_model_tp_plan`: names of modules and the library's
own styles. That plan requires the ranks to divide the heads, and replicates the vocabulary. The
table made from it shards q, k, v and o by heads, and the embedding and the head by the vocabulary.
The library itself is not imported.
"""

import fnmatch
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from torch import nn

from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table, by_pattern, matches, parent

#: The library's styles and ours; None: replicated, as experts are.
_STYLES: Final[dict[str, str | None]] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "colwise:2",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
    "embedding_rowwise": "vocabulary",
    "sequence_parallel": "sequence",
    "embedding_colwise": None,
    "packed_rowwise": None,
    "replicate": None,
    "moe_tp_experts": None,
    "moe_identity_expert": None,
    "grouped_gemm": None,
}
#: Types whose layers consist of norms, `self_attn`, `mlp` and sums, so that sp works.
_DECODERS: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "phi3", "granite", "olmo2"),
)
_COUNTS: Final = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_key_value_groups": "groups",
}


def own_plan(model: nn.Module) -> Table | None:
    """The table of a transformers model; None for other models, and for types without a plan."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str) or not hasattr(type(model), "base_model_prefix"):
        return None  # another library, a layer with its model's configuration, peft's wrapper
    if kind == "gpt2":
        return gpt2(model)
    names = [name for name, _ in model.named_modules()]
    plan = {key: style for key, style in _plan(model).items() if fnmatch.filter(names, key)}
    return _read(model, kind, plan) if plan else None


def gpt2(model: nn.Module) -> Table:
    """GPT-2, whose configuration has no plan; one Conv1D computes queries, keys and values."""
    heads, _ = _heads(model)
    sequence = {
        "h.0": "split",
        "h.*.ln_[12]": "sequence",
        "h.*.attn": "gather",
        "h.*.mlp": "gather",
        "ln_f": "sequence:join",  # the model reshapes this output to the shape of its input
    }
    base = Table.of(
        {
            "h.*.attn.c_attn": "colwise:qkv",
            "h.*.attn.c_proj": "rowwise:heads",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        heads=heads,
        sequence=sequence,
        sets={"h.*.attn": {"split_size": "queries", "num_heads": "heads"}},
    ).under(_base(model))
    words = _vocabulary(model)
    whole: Any = model
    reads = whole.get_input_embeddings()
    head = [name for name in words if model.get_submodule(name) is not reads]
    joined = tuple((name, "vocabulary:whole") for name in head)
    styles = (*words.items(), *base.styles)
    return replace(base, styles=styles, sequence=(*joined, *base.sequence))


def _plan(model: nn.Module) -> dict[str, str]:
    """The library's plans of the configuration, the class and the model; later ones override."""
    base = f"{_base(model)}." if _base(model) else ""
    of_config = getattr(model.config, "base_model_tp_plan", None) or {}
    plan: dict[str, str] = {f"{base}{key}": style for key, style in of_config.items()}
    for owner in (type(model), model):
        plan |= getattr(owner, "_tp_plan", None) or {}
    return plan


def _read(model: nn.Module, kind: str, plan: Mapping[str, str]) -> Table:
    heads, kv_heads = _heads(model)
    styles: dict[str, str] = _vocabulary(model)
    sequence: dict[str, str] = {}
    for key, said in plan.items():
        style = None if said.startswith("ep_") else _STYLES.get(said, "")
        if style == "":
            raise bad(
                f'the plan of {kind} in transformers, with the style "{said}" for {key}',
                f"plans with the styles {', '.join(_STYLES)}",
                'table={"...": "colwise", ...}, a table of your own; see docs/how-to/tables.md',
            )
        if style == "sequence":
            sequence[f"{key}?"] = style
        elif style is not None and key not in styles:
            styles[f"{key}?"] = _by_heads(key, style)
    names = [name for name, _ in model.named_modules()]
    table = Table.of(styles, heads, kv_heads)
    if kind in _DECODERS:
        sequence |= _sequence(model, set(matches(table, names, sp=False)))
    return replace(
        table, sequence=tuple(sequence.items()), sets=Table.of({}, sets=_sets(model, table)).sets
    )


def _by_heads(key: str, style: str) -> str:
    parts = key.split(".")
    if not any("attn" in part or "attention" in part for part in parts[:-1]):
        return style
    if style == "colwise":
        return "colwise:kv_heads" if {"k_proj", "v_proj"} & set(parts) else "colwise:heads"
    return "rowwise:heads" if style == "rowwise" else style


def _base(model: nn.Module) -> str:
    base = getattr(model, "base_model_prefix", "")
    return base if base and isinstance(getattr(model, base, None), nn.Module) else ""


def _heads(model: nn.Module) -> tuple[int | None, int | None]:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: list[int | None] = []
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = None
        with suppress(RuntimeError):  # raised if layers have different numbers
            count = getattr(text, name, None)
        found.append(count if isinstance(count, int) else None)
    return found[0], None if found[0] is None else found[1]


def _vocabulary(model: nn.Module) -> dict[str, str]:
    found: list[object] = []
    for ask in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError):
            found.append(getattr(model, ask, lambda: None)())
    # a layer that peft has copied to train it, for modules_to_save, is in a wrapper
    pairs = [(module, getattr(module, "original_module", module)) for module in found]
    if any(inner and not isinstance(inner, (nn.Embedding, nn.Linear)) for _, inner in pairs):
        return {}  # with adapters, or of another kind: it may share its weight with the other
    names = {module: name for name, module in model.named_modules()}
    return {names[m]: "vocabulary" for m in found if isinstance(m, nn.Module) and m in names}


def _sets(model: nn.Module, table: Table) -> dict[str, dict[str, str]]:
    if table.heads is None or table.keys is None:
        return {}
    right = {"heads": table.heads, "kv_heads": table.keys, "groups": table.heads // table.keys}
    names = [name for name, _ in model.named_modules()]
    cut = matches(table, names, sp=False)
    found: dict[str, dict[str, str]] = {}
    for block in {parent(name): None for name, style in cut.items() if style.by == "kv_heads"}:
        has = vars(model.get_submodule(block))
        counts = {key: what for key, what in _COUNTS.items() if has.get(key) == right[what]}
        found |= {block: counts} if counts else {}
    return by_pattern(found, names)


def _sequence(model: nn.Module, cut: set[str]) -> dict[str, str]:
    """The `sequence` styles of a decoder: norms and replicated experts act on shards."""
    base = f"{_base(model)}." if _base(model) else ""
    layers = list(model.get_submodule(f"{base}layers").named_children())
    styles: dict[str, str] = {}
    for index, layer in layers:
        for key, part in layer.named_children():
            name = f"{base}layers.{index}.{key}"
            if any(other.startswith(f"{name}.") for other in cut):
                styles[name] = "gather"
            else:
                modules = part.named_modules(prefix=name)
                holders = [n for n, m in modules if list(m.parameters(recurse=False))]
                styles |= dict.fromkeys(holders, "sequence")
    names = [name for name, _ in model.named_modules()]
    found = by_pattern(styles, names)
    return {f"{base}layers.0": "split"} | found | {f"{base}norm": "sequence"}
