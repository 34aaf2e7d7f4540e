"""Options of torch's classes of the same names, which a program that is ported from torch gives.

A call with one is refused by name, with what takes its place; Python's error would name it alone.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: Final = "the call without it: "
_DEVICE: Final = _NOTHING + "the module is put on the device of sw.init()"
_BOTH: Final = {
    "device_ids": _DEVICE,
    "output_device": _DEVICE,
    "process_group": "world=sw.init()",
    "mixed_precision": 'precision="bf16"',
}
#: What to write instead of each option.
DDP_OPTIONS: Final = _BOTH | {
    "bucket_cap_mb": "bucket_bytes=25 * 2**20",
    "find_unused_parameters": _NOTHING + "parameters without a gradient are found",
    "gradient_as_bucket_view": _NOTHING + "gradients are views of the buckets",
}
FSDP_OPTIONS: Final = _BOTH | {
    "auto_wrap_policy": "units=Block, a class of modules, a pattern of names, a size or a function",
    "device_id": _DEVICE,
    "device_mesh": "world=sw.init(), and shard_size= for HYBRID_SHARD",
    "use_orig_params": _NOTHING + "parameters keep their names and identity",
}
DATA_PARALLEL_OPTIONS: Final = {
    "device_ids": 'devices=["cuda:0", "cuda:1"]',
    "output_device": _NOTHING + "outputs are on the first device",
}


def refusing(name: str, options: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function, called `name`, raise InputError for an option of torch's."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """The function with the check of its keywords before it."""

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            """The function, unless an option is torch's."""
            for option in options:
                if option in kwargs:
                    given = (
                        f"{name} with {option}={short_repr(kwargs[option])}, as torch's takes it"
                    )
                    raise bad(given, f"the options of {name}", options[option])
            return function(*args, **kwargs)

        return checked

    return decorate
