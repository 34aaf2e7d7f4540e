"""`shardwise train --dry-run`: everything that is checked before a run, and its prediction.

It starts no rank and writes no file. Tokens that the cache does not have are made in a temporary
folder; a large source is read up to `MOST_BYTES`.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from shardwise.cli.predict_command import numbers_of
from shardwise.cli.predict_table import answer, show
from shardwise.prediction.cluster import cluster_of
from shardwise.train.config import Config
from shardwise.train.model import largest_share, predictor
from shardwise.train.prepare import RunStart, prepare, sources_of
from shardwise.train.progress import ranks_text
from shardwise.train.run_folder import finished_message

MOST_BYTES = 64 * 2**20


def dry_run(config: Config, ranks: int, start: RunStart) -> None:
    """Print the completed plan of a run on `ranks` ranks, and the prediction for its first rank."""
    began, start = time.perf_counter(), start.resolve_auto(config)
    with _without_cache(config) as own:
        prepared = prepare(own, ranks, start, MOST_BYTES)
    if start.resume and (done := finished_message(config)):
        print(done)
        return
    cut = any(replace(source, most_bytes=MOST_BYTES).cut for source in sources_of(config))
    train, share = config.train, largest_share(prepared)
    cluster = None if config.run.cluster is None else cluster_of(config.run.cluster)
    device = "cuda" if cluster is not None and cluster.device.asynchronous else "cpu"
    found = predictor(prepared, share, torch.device(device))(prepared.plan)
    print(
        f"{found.plan} on {ranks_text(ranks)}, {len(prepared.corpus.packed.stream):,} tokens of "
        f"{'the first 64 MiB of ' * cut}{', '.join(config.data.source)}, {train.steps} steps of "
        f"{train.batch} sequences of {prepared.sizes.sequence}"
    )
    numbers = numbers_of(found, config.model.name, began)
    size = None if cluster is None else cluster.device.memory_bytes
    told = answer(found, share, size, rows=train.batch, device=config.run.device)
    show(numbers, told, Console(emoji=False, highlight=False, markup=False))
    for note in found.notes:
        print(f"Note: {note}.")
    print("Nothing was started or written: the same command without --dry-run trains.")


@contextmanager
def _without_cache(config: Config) -> Iterator[Config]:
    """The configuration with a temporary cache that links to the files of the real one."""
    with tempfile.TemporaryDirectory() as folder:
        for file in config.cache.glob("*"):
            if file.suffix != ".lock":
                Path(folder, file.name).symlink_to(file.absolute())
        data = config.data.model_copy(update={"cache": folder})
        yield config.model_copy(update={"data": data})
