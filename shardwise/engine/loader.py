"""`sw.Loader`: torch's DataLoader with an engine's rows, which a run resumes within an epoch."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import flag, integer, short_repr
from shardwise.engine.engine import Engine


class LoaderOptions(TypedDict, total=False):
    """Options of torch's DataLoader that `sw.Loader` passes on."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    worker_init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    persistent_workers: bool


class Loader:
    """The batches of one epoch for `engine.step`: this data rank's rows of each global batch.

    The global batches depend on the seed and the epoch alone, so that a run which is resumed under
    another plan, or on more ranks, goes on with the same ones.

    dataset    with __len__ and __getitem__, as for torch's DataLoader
    batch      rows of a global batch; data ranks have equally many, or one more
    shuffle    in another order in each epoch
    drop_last  leave out the rows at the end that fill no batch
    options    of torch.utils.data.DataLoader

    `state_dict()` is the place in the epoch, for `extra=` of sw.save; the first loop after
    `load_state_dict` begins there, and any other at the beginning of the epoch. Raises InputError
    for arguments that give no batch.
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
        **options: Unpack[LoaderOptions],
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise bad(
                f"a {type(dataset).__name__} as the dataset of sw.Loader",
                "a dataset with __len__ and __getitem__",
                "torch.utils.data.DataLoader, for which each data rank reads its own rows",
            )
        if not isinstance(engine, Engine):
            given = f"engine={short_repr(engine)} of sw.Loader"
            raise bad(given, "what sw.parallelize returned", "sw.Loader(dataset, engine, 32)")
        integer("batch", batch, 1, 32)
        flag("shuffle", shuffle)
        flag("drop_last", drop_last)
        integer("seed", seed, 0, 0)
        self.dataset, self.batch = dataset, batch
        self.place, self.ranks = engine.data_rank, engine.data_ranks
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed, self.epoch, self.done, self.loaded = seed, 0, 0, 0
        # takes a batch_sampler, and refuses batch_size, shuffle and sampler, which stand here
        self.loader: Any = partial(DataLoader, dataset, 1, None, None, **options)
        try:
            self.loader([])
        except (TypeError, ValueError) as error:
            given = f"sw.Loader with {short_repr(options)}, which is refused ({error})"
            allowed = "options of torch.utils.data.DataLoader, except batch_size and the samplers"
            raise bad(given, allowed, "sw.Loader(dataset, engine, 32, num_workers=2)") from None
        if not len(self):
            raise bad(
                f"batch={batch} for a dataset of {len(dataset)} rows, which fills no batch",
                "a dataset that has a batch in each epoch",
                "a smaller batch, or drop_last=False",
            )

    def __len__(self) -> int:
        rows = len(self.dataset)
        return rows // self.batch if self.drop_last else -(-rows // self.batch)

    def __iter__(self) -> Iterator[Any]:
        done, self.loaded = self.loaded, 0
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")
        rows = order if self.shuffle else order.sort().values
        every = rows.split(self.batch)[done : len(self)]
        own = [part.tensor_split(self.ranks)[self.place].tolist() for part in every]
        # where a batch has no row for this rank, another row without its values
        made_all = self.loader([part or [0] for part in own])
        for self.done, (part, made) in enumerate(zip(own, made_all, strict=True), done + 1):
            yield made if part else tree_map_only(Tensor, lambda x: x[:0], made)
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        place = {"epoch": self.epoch, "done": self.done, "seed": self.seed}
        return place | {"batch": self.batch, "rows": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a loader of the same batch and rows was. Raises InputError for others."""
        own = self.state_dict()
        fits = isinstance(state, dict) and state.keys() == own.keys()
        fits = fits and all(isinstance(n, int) and n >= 0 for n in state.values())
        fits = fits and all(state[name] == own[name] for name in ("batch", "rows"))
        if not fits or state["done"] > len(self):
            raise bad(
                f"{state!r} in a loader with batch={self.batch} and {own['rows']} rows",
                "state_dict() of a loader with the same batch, for a dataset of as many rows",
                "sw.Loader(dataset, engine, batch) with those of the run that saved the state",
            )
        self.epoch, self.done, self.seed = state["epoch"], state["done"], state["seed"]
        self.loaded = self.done
