"""A text stream that drops what cannot be written, so that a run outlives its log.

The reader may close (`shardwise train ... | head`), or the disk of the log may be full.
"""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class LossyStream:
    """Drops everything after a failed write, and says so once on stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Point the descriptor at /dev/null, so that no later write and no exit fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._stream.fileno() != 2:
            why = error.strerror or str(error)
            with suppress(OSError):
                print(
                    f"shardwise: the output cannot be written ({why}) and is dropped from here on; "
                    "the run goes on",
                    file=sys.stderr,
                    flush=True,
                )
