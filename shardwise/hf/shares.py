"""The rows of a data rank: the shares of global batches, and the batches of one update as one.

    order of the sampler      0 1 2 3 4 5 6 7 | 8 9       batches of 8 rows, those of all data ranks
    data rank 0 of 2          0 1 2 3         | 8
    data rank 1               4 5 6 7         | 9         ranks of one data rank read the same rows

One process with batches of 8 rows computes the same updates.  A share may be empty: then it is a
batch without rows, which has weight zero.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers.trainer_utils import seed_worker

from shardwise.comm.move import all_gather
from shardwise.comm.world import World
from shardwise.core.errors import bad
from shardwise.core.tools.tree import mapped
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer

#: What rows of an update are padded with at their ends, by the name of the tensor.
PADDING: Final = {"labels": -100, "attention_mask": 0}


class Shares(BatchSampler):
    """The share of data rank `rank` in each global batch: `batches` for each of `ranks`."""

    def __init__(self, batches: BatchSampler, ranks: int, rank: int) -> None:
        super().__init__(batches.sampler, batches.batch_size * ranks, batches.drop_last)
        self.ranks, self.rank = ranks, rank

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            ends = [len(batch) * (self.rank + n) // self.ranks for n in (0, 1)]
            yield batch[slice(*ends)]


class Collate:
    """A loader's collator that makes a batch without rows of a share without rows."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, samples: Sequence[Any]) -> Any:
        if samples:
            return self.collate(samples)
        return first_rows(dict(self.collate([self.dataset[0]])), 0)


def divided(loader: DataLoader[Any], ranks: int, rank: int) -> DataLoader[Any]:
    """The loader of one data rank, for a dataset with indices."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or loader.batch_size is None:
        raise bad(
            "a DataLoader with a batch_sampler of its own",
            "a DataLoader with batch_size and sampler, whose rows the plan divides",
            "DataLoader(data, batch_size=8, sampler=sampler)",
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=Shares(batches, ranks, rank),
        collate_fn=Collate(loader.collate_fn, loader.dataset),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )


def first_rows(x: Any, rows: int) -> Any:
    return mapped(lambda t: t[:rows] if t.dim() else t, x, Tensor, objects=True)


def rows_in(batch: Mapping[str, Any]) -> int:
    return next((len(x) for x in batch.values() if isinstance(x, Tensor) and x.dim()), 0)


# --- the batches of one update -----------------------------------------------------------------


def joined(batches: Sequence[dict[str, Any]], padding: Mapping[str, int]) -> dict[str, Any]:
    """The rows of several batches as one batch; shorter rows are padded at their ends.

    `padding` has the value for each tensor that may be padded.

    Raises InputError for other tensors of different lengths.
    """
    batches = [batch for batch in batches if rows_in(batch)] or [*batches[:1]]
    if len(batches) == 1:
        return batches[0]
    out: dict[str, Any] = {}
    for name, first in batches[0].items():
        values = [batch.get(name) for batch in batches]
        if isinstance(first, Tensor) and first.dim():
            out[name] = torch.cat(_same_length(name, values, batches[0], padding))
        else:
            out[name] = first
    return out


def _same_length(
    name: str, values: Sequence[Any], batch: Mapping[str, Any], padding: Mapping[str, int]
) -> list[Tensor]:
    if len({tuple(x.shape[1:]) for x in values}) == 1:
        return [*values]
    paddable = all(x.dim() == 2 for x in values) and name in padding and "attention_mask" in batch
    if not paddable:
        shapes = ", ".join(str(list(x.shape)) for x in values[:4])
        raise bad(
            f"microbatches of one update whose {name!r} have the shapes {shapes}",
            f"equal shapes, or rows that may be padded: {', '.join(padding)} with attention_mask",
            "padding='max_length' of the collator, or gradient_accumulation_steps=1",
        )
    longest = max(x.shape[1] for x in values)
    return [pad(x, (0, longest - x.shape[1]), value=padding[name]) for x in values]


# --- what all data ranks have ------------------------------------------------------------------


def gathered(x: Tensor, world: World, data_rank: int, rows: int) -> Tensor:
    """The rows of all data ranks in order, at most the shares' `rows`. All ranks call it."""
    own = torch.tensor([data_rank, rows, len(x)], device=world.device)
    marks = [mark.tolist() for mark in all_gather(own, world.everyone)]
    longest = max(length for _, _, length in marks)
    padded = x.new_zeros(longest, *x.shape[1:]).to(world.device)
    padded[: len(x)] = x
    parts: dict[int, Tensor] = {}
    total = 0
    for (rank, share, length), part in zip(marks, all_gather(padded, world.everyone), strict=True):
        if rank not in parts:
            parts[rank] = part[:length]
            total += share
    return torch.cat([parts[rank] for rank in sorted(parts)])[:total]


class DataRanks(Accelerator):
    """Divides rows over data ranks, and gathers them; the engine does everything else.
    `rows`: of the share that is evaluated; `skipped`: the engine left out the last update.
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

    def prepare_model(self, model: nn.Module, *_: object, **__: object) -> nn.Module:
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
    """The optimizer groups for Trainer's loop. `step` does nothing: `engine.step` has updated."""

    def __init__(self, of: ShardedOptimizer) -> None:  # Optimizer.__init__ would make new groups
        self.of = of
        self.defaults, self.state, self.param_groups = of.defaults, of.state, of.param_groups

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears each gradient after its update."""

    def state_dict(self) -> dict[str, Any]:
        return self.of.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.of.load_state_dict(state_dict)
