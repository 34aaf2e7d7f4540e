"""this file is the reason why saving or loading failed, which may lie with another rank."""

from torch.distributed.checkpoint.api import CheckpointException

from shardwise.core.errors import InputError, RunError


def reason(error: CheckpointException, what: str) -> BaseException:
    """The error to raise on every rank instead of torch's.

    Bad input stays what it is, and so does the wish to leave; all else is a RunError that names
    the first rank that had it.
    """
    rank, (cause, _) = min(error.failures.items(), key=lambda entry: entry[0])
    given = [c for c, _ in error.failures.values() if isinstance(c, InputError)]
    if given:
        return given[0]
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        return cause
    return RunError(f"{what}: on rank {rank}, {type(cause).__name__}: {cause}")
