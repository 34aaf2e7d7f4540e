"""Output that may be lost: a run goes on when its log cannot be written.

`shardwise train ... | head`, a terminal that is closed, a log on a full disk: the text is lost, and
not the run.
"""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class LossyStream:
    """A text stream that drops everything after a failed write, and says so once elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop the text."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush; what cannot be written is dropped."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Let the descriptor write nowhere, so that no later write and no exit fails."""
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
