"""Hashes of the data's files: a file is read again only if it has changed.

They are kept beside the tokenised data. A hash is used again only while the file's size, times and
inode are those of the time when it was read. The time of the last change of its inode (ctime) is
among them, which no program can set back. A file that changed in the last seconds before it was
read is hashed again: its next change may get the same time. A lock lets one process on each
machine hash; the others wait and take its hashes.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from shardwise.checkpoint.lock import locked
from shardwise.train.publish import publish

#: Younger changes can share their time with a later one: the coarsest clock of a file system.
SETTLED_S: Final = 3.0
LENGTH: Final = hashlib.blake2b().digest_size


State = list[int]  # size, time of change, time of change of the inode, inode
Known = dict[str, tuple[State | None, str]]  # of each path; no state: to be hashed again


def hashes(files: Sequence[Path], cache: Path) -> list[bytes]:
    """The hash of each file's content. Raises OSError for one that cannot be read."""
    paths = [str(file.absolute()) for file in files]
    name = hashlib.blake2b("\0".join(paths).encode(errors="replace"), digest_size=12).hexdigest()
    kept = cache / f"{name}.hashes.json"
    with one_at_a_time(cache / f"{name}.lock"):
        known = _read(kept)
        found: Known = {}
        for path in paths:
            before = known.get(path)
            unchanged = before is not None and before[0] == _state(path)
            found[path] = before if before is not None and unchanged else _hashed(path)
        if found != known:
            text = json.dumps(found)
            with suppress(OSError):  # a cache that cannot be written
                publish(kept, lambda beside: beside.write_text(text, encoding="utf-8"))
    return [bytes.fromhex(found[path][1]) for path in paths]


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for the lock `file`; nobody writes in a folder in which it cannot be made."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(locked(file, math.inf))
        yield


def _hashed(path: str) -> tuple[State | None, str]:
    """The file's state and hash; without the state if it may change unseen."""
    began_ns, state = time.time_ns(), _state(path)
    with Path(path).open("rb") as stream:
        content = hashlib.file_digest(stream, "blake2b").hexdigest()
    settled = began_ns - max(state[1:3]) > SETTLED_S * 1e9 and state == _state(path)
    return (state if settled else None), content


def _state(path: str) -> State:
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _read(kept: Path) -> Known:
    """The file's content; empty if there is none, or it is damaged."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        known = {str(path): (state, str(content)) for path, (state, content) in found.items()}
        return {path: one for path, one in known.items() if len(bytes.fromhex(one[1])) == LENGTH}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
