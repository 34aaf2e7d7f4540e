"""`sw.Loader`: torch's DataLoader with an engine's rows, which a run resumes within an epoch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import flag, integer
from shardwise.engine.engine import Engine


class Loader:
    """The batches of one epoch for `engine.step`: this data rank's rows of each global batch.

    The global batches depend on the seed and the epoch alone, so that a run which is resumed under
    another plan, or on more ranks, goes on with the same ones.

    dataset    with __len__ and __getitem__, as for torch's DataLoader
    batch      rows of a global batch; data ranks have equally many, or one more
    shuffle    in another order in each epoch
    drop_last  leave out the rows at the end that fill no batch
    options    of torch.utils.data.DataLoader, such as collate_fn, num_workers, pin_memory

    `state_dict()` is the place in the epoch, for `extra=` of sw.save; a loop that is left and begun
    again goes on from there. Raises InputError for a dataset without a length.
    """

    def __init__(
        self,
        dataset: Any,
        engine: Engine,
        batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise bad(
                f"a {type(dataset).__name__} without a length as the dataset of sw.Loader",
                "a dataset with __len__ and __getitem__",
                "torch.utils.data.DataLoader, for which each data rank reads its own rows",
            )
        integer("batch", batch, 1, 32)
        flag("shuffle", shuffle)
        flag("drop_last", drop_last)
        integer("seed", seed, 0, 0)
        self.dataset, self.batch, self.options = dataset, batch, options
        self.place, self.ranks = engine.data_rank, engine.data_ranks
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed, self.epoch, self.done = seed, 0, 0

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        rows = len(self.dataset)
        return rows // self.batch if self.drop_last else -(-rows // self.batch)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
        rows = order if self.shuffle else order.sort().values
        every = rows.split(self.batch)[self.done : len(self)]
        own = [part.tensor_split(self.ranks)[self.place].tolist() for part in every]
        made: Any = None
        for made in DataLoader(self.dataset, batch_sampler=[*filter(None, own)], **self.options):
            self.done += 1
            yield made
        for _ in range(own.count([])):  # the last batch has no row for this rank
            self.done += 1
            yield tree_map_only(Tensor, lambda x: x[:0], made)
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done, "seed": self.seed, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a loader with the same batch was. Raises InputError for another batch."""
        if state["batch"] != self.batch:
            raise bad(
                f"a state of sw.Loader with batch={state['batch']} in one with batch={self.batch}",
                "the same number of rows of a global batch",
                f"sw.Loader(dataset, engine, {state['batch']})",
            )
        self.epoch, self.done, self.seed = state["epoch"], state["done"], state["seed"]
