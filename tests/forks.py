"""Ranks forked from one process that has imported torch, for tests in the process of pytest.

To import torch takes a rank 3 s of processor time, and what it trains and draws with 2 s more. A
forked rank finds the environment, the directory and the streams of the test. Ranks have
interpreters of their own in tests that start a program by `subprocess`, or that take the fixture
`interpreters`.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from typing import Any

import pytest

from shardwise.comm.start.rendezvous import LAUNCHER

#: What the process that forks has imported; this file among it, so that it knows that process's
#: environment. The judge's plugin comes first: it changes what is imported.
IMPORTED = (
    *(["tests.mechanical"] if "SHARDWISE_TESTS_MUTATION" in os.environ else []),
    *("torch._dynamo", "shardwise.verify.command", "shardwise.train.prepare"),
    *("shardwise.train.loop", "tests.pool", "tests.forks", "tests.programs"),
    *("torch.distributed.run", "matplotlib.backends.backend_svg"),
    *(f"transformers.models.{name}" for name in ("auto.modeling_auto", "llama.modeling_llama")),
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(IMPORTED))
ENVIRONMENT = dict(os.environ)


class Origin:
    """Environment and streams of a process that is started. If not given, they are those that the
    process that starts it has at that time.
    """

    def __init__(
        self, variables: Mapping[str, str] | None = None, streams: tuple[Any, ...] = (1, 2)
    ) -> None:
        self.variables, self.streams = variables, streams

    def __reduce__(self) -> Any:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        variables = os.environ if self.variables is None else self.variables
        return Origin, (dict(variables), tuple(map(reduction.DupFd, self.streams)))

    def enter(self) -> None:
        """Make them those of this process, beside the variables that the launcher has set."""
        assert self.variables is not None
        own = {name: text for name, text in os.environ.items() if ENVIRONMENT.get(name) != text}
        os.environ.clear()
        os.environ.update({**self.variables, **own})
        if LAUNCHER in self.variables:  # the parent of a rank is its launcher
            os.environ[LAUNCHER] = str(os.getppid())
        for number, stream in enumerate(self.streams, start=1):
            given = stream.detach()
            os.dup2(given, number)
            os.close(given)


def run(function: Callable[..., Any], args: tuple[Any, ...], origin: Origin) -> Any:
    gc.freeze()
    origin.enter()
    return function(*args)


def rank_process(*args: Any) -> Any:
    """The process of a rank, in place of the launcher's `process_of`."""
    from shardwise.comm.start import worker

    return CONTEXT.Process(target=run, args=(worker.run, args, Origin()))


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Make the launcher of this process fork its ranks."""
    from shardwise.comm.start import launch

    patch.setattr(launch, "process_of", rank_process)
