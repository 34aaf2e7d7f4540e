"""Files that a user names: variables in their names, and limits of what is read."""

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad

#: The most bytes of a file that a person writes: a configuration, a cluster, a table.
MOST_BYTES: Final = 4 * 2**20


def expanded(name: str) -> str:
    """The name with `~` and `$VARIABLES` replaced, as a shell does it.

    Raises InputError for a variable that is not set.
    """
    found = os.path.expandvars(name)
    if unset := re.search(r"\$([A-Za-z_]\w*|\{[^}]*\})", found):
        variable = unset[0].strip("${}")
        allowed = f"a path whose variables are set, and {variable} is not"
        raise bad(f"'{name}'", allowed, f"export {variable}=... before the command")
    return os.path.expanduser(found)  # noqa: PTH111 (Path raises for ~NAME of nobody)


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError for a pipe or a device, and never waits."""
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(opened, "rb")


def read_text(file: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, in UTF-8, without a byte order mark.

    Raises OSError for a file that is no regular one, cannot be read, or is too large.
    """
    with open_regular(file) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes / 2**20:g} MiB")
    return content.decode("utf-8-sig")
