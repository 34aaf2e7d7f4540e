"""Ranks forked from one process that has imported torch, for tests in the process of pytest.

To import torch takes a rank 3 s of processor time, and longer than most tests. `spawn` and `launch`
start, watch and end ranks as everywhere else; only where a rank's process comes from differs. It
finds the environment, the directory and the streams of the test. Ranks have interpreters of their
own in tests that start a program by `subprocess`, or that take the fixture `interpreters`.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import pytest

from shardwise.comm.rendezvous import LAUNCHER

#: Of the judge of the suite (tests/mutants.py).
JUDGED = {"SHARDWISE_TESTS_MUTATION", "SHARDWISE_TESTS_RECORD"}
#: What the process that forks has imported; this file among it, so that it knows that process's
#: environment.
IMPORTED = (
    *("torch._dynamo", "shardwise.verify.command", "shardwise.train.prepare"),
    *("shardwise.train.loop", "tests.pool", "tests.forks"),
    *(["tests.mutated"] if JUDGED & set(os.environ) else []),
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(IMPORTED))
ENVIRONMENT = dict(os.environ)


class Origin:
    """Environment and streams of the process that starts a rank, as they are when it starts it."""

    def __init__(self, variables: dict[str, str], streams: tuple[Any, ...]) -> None:
        self.variables, self.streams = variables, streams

    def __reduce__(self) -> Any:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return Origin, (dict(os.environ), tuple(map(reduction.DupFd, (1, 2))))

    def enter(self) -> None:
        """Make them those of this process, beside the variables that the launcher has set."""
        own = {name: text for name, text in os.environ.items() if ENVIRONMENT.get(name) != text}
        os.environ.clear()
        os.environ.update(self.variables | own)
        if LAUNCHER in self.variables:  # the parent of a rank is its launcher
            os.environ[LAUNCHER] = str(os.getppid())
        for number, stream in enumerate(self.streams, start=1):
            given = stream.detach()
            os.dup2(given, number)
            os.close(given)


def run(function: Callable[[Any], Any], job: Any, origin: Origin) -> Any:
    """The entry point of a rank that was forked."""
    gc.freeze()
    origin.enter()
    return function(job)


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Make the launcher of this process fork its ranks."""
    from shardwise.comm import ranks, worker

    def forked(job: worker.Job) -> Any:
        return CONTEXT.Process(target=run, args=(worker.run, job, Origin({}, ())))

    patch.setattr(ranks, "process_of", forked)
