"""`sw.hf.Trainer`: the Trainer of transformers, whose steps run under a plan.

from shardwise.hf import Trainer
trainer = Trainer(model=model, args=args, train_dataset=rows, plan="zero3")
"""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from shardwise.core.errors import bad

if TYPE_CHECKING:
    from shardwise.hf.trainer import Trainer

__all__ = ["Trainer"]

#: The first versions whose Trainer has the methods that `sw.hf.Trainer` overrides.
OLDEST: Final = {"transformers": (5, 23), "accelerate": (1, 15)}


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # imported when asked for, since transformers is an extra
        _require_installed()
        from shardwise.hf.trainer import Trainer

        return Trainer
    text = f"module 'shardwise.hf' has no attribute {name!r}"
    raise AttributeError(text, name=name)


def _require_installed() -> None:
    wanted = [f"'{name}>={major}.{minor}'" for name, (major, minor) in OLDEST.items()]
    for name, oldest in OLDEST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = ""
        if not found or tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            raise bad(
                f"shardwise.hf with {f'{name} {found}' if found else f'no {name}'}",
                f"{' and '.join(wanted)}, of the extra `hf`",
                f"pip install {' '.join(wanted)}",
            )
