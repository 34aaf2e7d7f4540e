"""Proves a plan: compares its run with one process, and with the predicted bytes and memory.

The folder is also the function `sw.verify`: once a module of it is imported, Python binds the
folder to that name, so the folder itself can be called.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from shardwise.core.layouts.tensor_table import Table
    from shardwise.core.plan.plan import Plan
    from shardwise.verify.report import Report


class Verify(ModuleType):
    """The folder, with `sw.verify` as its call."""

    def __call__(
        self,
        build: Callable[[], Any] | str,
        plan: "Plan | str",
        *,
        batch: Any = None,
        loss: "Callable[[nn.Module, Any], Tensor] | None" = None,
        tokens: Callable[[Any], float] | None = None,
        steps: int = 3,
        units: str | int = "auto",
        table: "Table | Mapping[str, str] | None" = None,
        device: str | None = None,
    ) -> "Report":
        """Prove that `plan` computes what one process computes, with the predicted bytes.

        As `shardwise verify`, for a model defined in Python; it starts as many local ranks as the
        plan needs. Under torchrun or Slurm all ranks call it.

        build      returns the module, or (module, loss, make_batch); or a name for --model
        batch      an example batch, whose rows are drawn at random; or make_batch(rows, seed)
        loss       loss(model, batch), the mean over the batch's tokens; without it the model
                   returns its loss, as in sw.parallelize
        tokens     tokens(batch) counts the tokens; without it every row has the same weight
        steps      how many steps are compared
        units      as in sw.parallelize; and `table`
        device     "cpu" (the default) or "cuda", with a GPU for each rank

        Raises InputError for a plan or model that cannot run, RankError if a rank fails.
        """
        from shardwise.comm.start.launch import can_fork
        from shardwise.verify.command import model_of, verify
        from shardwise.verify.inputs import Options

        model = model_of(build, batch, loss, tokens)
        options, fork = Options(units, table), can_fork(device or "cpu")
        return verify(plan, model, steps, options, device=device, fork=fork)


sys.modules[__name__].__class__ = Verify
