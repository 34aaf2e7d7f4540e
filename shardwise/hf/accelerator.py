"""The Accelerator and the optimizer that Trainer sees: both belong to an engine."""

from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import seed_worker

from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.hf.shares import divided, gathered


class DataRanks(Accelerator):
    """Divides rows over data ranks, and gathers them; the engine does everything else.

    `rows` is the number of rows of the share that is evaluated, `skipped` whether the engine left
    out the last update.
    """

    engine: Engine
    rows = 0
    skipped = False

    @property
    def num_processes(self) -> int:
        """One: losses are those of all data ranks already, so Trainer must not scale them."""
        return 1

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a scheduler must wait, since the last step has not updated."""
        return self.skipped

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged: the engine has already sharded it."""
        self._models.append(model)
        return model

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """The loader of this rank's data rank."""
        ranks, rank = self.engine.data_ranks, self.engine.data_rank
        shares: dict[str, Any]
        if isinstance(data_loader.dataset, IterableDataset):
            own, shares = data_loader, {"num_processes": ranks, "process_index": rank}
        else:
            own = divided(data_loader, ranks, rank)
            shares = {"num_processes": 1, "process_index": 0}
        if own.num_workers:  # equal on ranks of one data rank
            own.worker_init_fn = partial(seed_worker, num_workers=own.num_workers, rank=rank)
        prepared = prepare_data_loader(
            own,
            self.device,
            **shares,
            put_on_device=True,
            rng_types=None,
            dispatch_batches=False,
            use_seedable_sampler=True,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """The tensors of all data ranks, concatenated."""
        return self.gather_for_metrics(tensor, rows=0)

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, rows: int | None = None
    ) -> Any:
        """The rows of all data ranks, in their order; of losses as many as there are rows."""
        engine = self.engine

        def every(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            flat = x if x.dim() else x.view(1)
            share = self.rows if rows is None else len(flat)
            return gathered(flat, engine.world, engine.data_rank, share)

        return tree_map(every, input_data)


class Updated(Optimizer):
    """What Trainer's loop and its callbacks hold: the groups of the engine's optimizer.

    `engine.step` has updated when the loop calls `step`, which therefore does nothing.
    """

    def __init__(self, of: ShardedOptimizer) -> None:  # Optimizer.__init__ would make new groups
        self.of = of
        self.defaults, self.state, self.param_groups = of.defaults, of.state, of.param_groups

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears each gradient after its update."""

    def state_dict(self) -> dict[str, Any]:
        return self.of.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.of.load_state_dict(state_dict)
