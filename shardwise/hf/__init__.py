"""`sw.hf.Trainer`: the Trainer of transformers, whose steps run under a plan.

from shardwise.hf import Trainer
trainer = Trainer(model=model, args=args, train_dataset=rows, plan="zero3")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.hf.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # imported when asked for, since transformers is an extra
        from shardwise.hf.installed_libraries import require_installed

        require_installed()
        from shardwise.hf.trainer import Trainer

        return Trainer
    text = f"module 'shardwise.hf' has no attribute {name!r}"
    raise AttributeError(text, name=name)
