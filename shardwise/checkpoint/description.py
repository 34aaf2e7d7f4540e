"""The description of the model in a checkpoint, for other programs: configuration and names.

config      the configuration of a model of transformers, or the fields of a dataclass
generation  how a model of transformers generates text
tied        names of one tensor, in the order of the model's state_dict
transient   buffers that are not in the state_dict
"""

import json
from dataclasses import asdict, is_dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.state.full import entries, is_extra, plain_key, plain_of
from shardwise.wrap.plain_loop import PlainLoop


def described(trained: Engine | PlainLoop) -> dict[str, Any]:
    """The description of the model, the same on every rank."""
    model = plain_of(trained) if isinstance(trained, Engine) else trained.plain
    names: dict[int, list[str]] = {}
    for key, value in entries(model):
        if isinstance(value, Tensor) and not is_extra(key):
            names.setdefault(id(value), []).append(plain_key(key))
    known = {name for group in names.values() for name in group}
    buffers = (plain_key(name) for name, _ in model.named_buffers())
    own = trained.model if isinstance(trained, Engine) else trained.module
    return {
        "config": config_of(own),
        "generation": generation_of(own),
        "tied": [group for group in names.values() if len(group) > 1],
        "transient": [name for name in buffers if name not in known],
    }


def generation_of(model: nn.Module) -> dict[str, Any] | None:
    """The `generation_config` of a model of transformers as a JSON object; None without one."""
    config: Any = getattr(model, "generation_config", None)
    try:
        return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
    except (TypeError, ValueError):  # a field that JSON cannot hold
        return None


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The model's `config` as a JSON object; None if it has none that JSON can hold."""
    config: Any = getattr(model, "config", None)
    try:
        if hasattr(config, "to_json_string"):
            found = json.loads(config.to_json_string())
            return found | {"architectures": [type(model).__name__]}
        if is_dataclass(config) and not isinstance(config, type):
            return json.loads(json.dumps(asdict(config)))
    except (TypeError, ValueError):  # a field that JSON cannot hold
        return None
    return None
