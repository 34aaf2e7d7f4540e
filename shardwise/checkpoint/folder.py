"""The folder of checkpoints: publishing, finding and removing them, always keeping a complete one.

    step-000100/           a checkpoint: files of tensors, .metadata, manifest.json
    step-000200/
    latest                 the name of the newest, a line of text
    .saving-step-000300/   one being written; becomes step-000300 by one rename when it is complete
    .removing-.../         one being removed, under a name that is not a checkpoint's
    step-000200.before/    a step that is saved a second time, until the second has its name

A reader follows `latest`, or takes the newest name if `latest` is missing or wrong. A writer first
completes what an interrupted writer left unfinished.
"""

import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardwise.core.errors import InputError, RunError, bad, causes, expanded
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import integer

METADATA, MANIFEST = ".metadata", "manifest.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # the folder of checkpoints inside a run's folder
TOKENIZER = "tokenizer"  # the folder of the run's tokenizer, inside a run's folder
#: The files of a tokenizer of transformers.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
)
LONGEST = 1000  # bytes of `latest` that are read
_NAME = re.compile(r"step-(\d+)(\.before)?")
#: The file in a checkpoint's folder that becomes `latest` when it is published.
_POINTER = f".{LATEST}"


def as_path(folder: object) -> Path:
    if isinstance(folder, (str, os.PathLike)) and folder != "" and "\0" not in str(folder):
        return Path(expanded(os.fspath(folder)))
    allowed = "text or a pathlib.Path, the name of a folder"
    raise bad(f"the checkpoint folder {folder!r}", allowed, '"runs/example"')


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise _none(path, "not named after a step")
    return int(found[1])


def is_named_by_step(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def passed_over(folder: Path) -> str:
    """Why `find` returns another checkpoint than `latest` or the newest; "" if it does not."""
    whole = all_in(folder)
    if not whole:
        return ""
    found, latest = find(folder), _latest(folder)
    if latest not in whole:
        what = f"names {latest.name}, which is" if _NAME.fullmatch(latest.name) else "names"
        return f"{folder / LATEST} {what} no complete checkpoint: {found.name} is used instead"
    if found != whole[-1]:
        return f"{folder / LATEST} names {found.name}, though {whole[-1].name} is newer"
    return ""


def unfinished(folder: Path, step: int) -> Path:
    return folder / f".saving-{name_of(step)}"


def is_whole(path: Path) -> bool:
    return (path / METADATA).is_file() and (path / MANIFEST).is_file()


def is_checkpoint(path: Path) -> bool:
    """Complete, or named after a step with a file missing."""
    files = (path / name for name in (METADATA, MANIFEST))
    return is_whole(path) or (is_named_by_step(path) and any(map(os.path.lexists, files)))


def all_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; a step's second save comes after the first."""
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("step-*")]
    named = [(int(m[1]), m[2] is None, path) for path, m in found if m and is_whole(path)]
    return [path for _, _, path in sorted(named)]


def of_run(path: Path) -> Path:
    """The folder of checkpoints in a run's folder; any other path is returned unchanged."""
    inside = path / CHECKPOINTS
    try:
        return inside if inside.is_dir() and not is_whole(path) and not all_in(path) else path
    except (OSError, ValueError):  # an impossible name; `find` raises the error
        return path


def find(folder: str | os.PathLike[str]) -> Path:
    """The newest complete checkpoint in a folder, or the folder itself if it is a checkpoint."""
    folder = as_path(folder)
    try:
        if is_checkpoint(folder):
            return folder
        whole = all_in(folder)
        latest = _latest(folder)
        there = folder.is_dir(), folder.exists()
    except (OSError, ValueError) as error:  # no permission; an impossible name
        raise _none(folder, getattr(error, "strerror", None) or str(error)) from None
    if not whole:
        what = {(True, True): "no complete checkpoint in it", (False, True): "a file, not a folder"}
        raise _none(folder, what.get(there, "no such folder"))
    return latest if latest in whole else whole[-1]


def _latest(folder: Path) -> Path:
    """The path that `latest` names. It may not exist, since the file may be damaged or missing."""
    file = folder / LATEST
    if not file.is_file():
        return folder
    with file.open("rb") as stream:
        return folder / stream.read(LONGEST).decode(errors="replace").strip()


def _none(folder: Path, what: str) -> InputError:
    return bad(
        f"the checkpoint folder '{folder}' ({what})",
        "a folder that contains step-000100 or the like, or such a folder itself",
        "the path of a run's 'checkpoints' folder",
    )


def prune(folder: str | os.PathLike[str], keep: int, *, best: bool = False) -> list[Path]:
    """Remove all but the `keep` newest checkpoints; returns those removed. One rank calls it. The
    checkpoint that `find` returns stays, and with `best` the one of `best_in`.
    """
    integer("keep", keep, 1, 2)
    whole = all_in(as_path(folder))
    kept = {*whole[-keep:], *([best_in(folder)] if best else [])}
    old = [path for path in whole if path not in kept and path != find(folder)]
    for path in old:
        remove(path)
    return old


def best_in(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint with the lowest validation loss, the newest of several; None without one."""
    losses = [(_validation(path), path) for path in reversed(all_in(as_path(folder)))]
    loss, path = min(losses, key=lambda each: each[0], default=(math.inf, None))
    return path if math.isfinite(loss) else None


def _validation(path: Path) -> float:
    """Infinity if a checkpoint's scalars have no validation loss."""
    try:
        loss = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["scalars"]["validation"]
        return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def clear(path: Path) -> None:
    """Make an empty folder, and remove what interrupted saves left. One rank calls it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _settle(path.parent)
    for left in (*path.parent.glob(".saving-*"), *path.parent.glob(".removing-*")):
        shutil.rmtree(left, ignore_errors=left != path)
    path.mkdir()


def publish(path: Path, step: int) -> Path:
    """Rename a complete checkpoint to its final name, and update `latest`. One rank calls it. All
    that a full disk can refuse is written before the first rename.
    """
    folder, final = path.parent, path.with_name(name_of(step))
    before = final.with_name(f"{final.name}.before")
    (path / _POINTER).write_text(f"{final.name}\n", encoding="utf-8")
    swap_in(path, final, before)
    (final / _POINTER).replace(folder / LATEST)
    sync(folder)
    if before.exists():
        remove(before)
    return final


def swap_in(written: Path, final: Path, before: Path) -> None:
    """Fsync a complete folder and rename it to `final`; one of that name becomes `before`."""
    for entry in (*written.iterdir(), written):
        sync(entry)
    if final.exists():
        final.rename(before)
    written.rename(final)
    sync(final.parent)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename, so that readers never see a partial file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _settle(folder: Path) -> None:
    for before in folder.glob("step-*.before"):
        final = before.with_name(before.name.removesuffix(".before"))
        if final.exists():
            remove(before)
        else:
            before.rename(final)
        sync(folder)


def remove(path: Path) -> None:
    """Under another name, so that a reader never finds a part. One rank calls it."""
    aside = path.with_name(f".removing-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)


def require_snapshots(plan: Plan) -> None:
    """Raise InputError for states on a disk, which a snapshot would copy to host memory."""
    if any(each.states.moves().offload == "disk" for each in plan.of_all_layers):
        raise bad(
            f"an asynchronous save under the plan '{plan}', whose states are on a disk",
            "states in device or host memory, since a snapshot is a copy of them in host memory",
            "sw.save(engine, folder); for shardwise train, train.async_save = false",
        )


# --- errors of saving and loading: one paragraph, the same on every rank --------------------------

#: Less free space than this is the likely reason of a failed write.
LITTLE_BYTES = 2**24
#: Source locations and addresses that torch's C++ adds to its messages.
_CPP = re.compile(r"\[enforce fail at [^]]*\]\s*\.?\s*|\(function \w+\)|Exception raised from.*")


def reason(failures: Mapping[int, BaseException], what: str) -> BaseException:
    """The error to raise on every rank: an InputError, an interrupt, or a RunError of one rank."""
    rank, cause = min(failures.items(), key=lambda entry: entry[0])
    refused = [error for error in failures.values() if isinstance(error, InputError)]
    if refused:
        return refused[0]
    if isinstance(cause, KeyboardInterrupt | SystemExit | RunError):
        return cause
    return RunError(f"{what}: on rank {rank}, {type(cause).__name__}: {plain(str(cause))}")


def plain(text: str) -> str:
    """The first line of an error's text, without C++ source locations."""
    lines = _CPP.sub("", text).strip().splitlines()
    return lines[0].strip() if lines else "unknown reason"


def unwritten(error: OSError | RuntimeError, folder: Path) -> OSError:
    """The operating system's error behind a failed write, which torch's zip writer hides."""
    for cause in causes(error):
        if isinstance(cause, OSError):
            return cause
    if free_bytes(folder) < LITTLE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(errno.EIO, plain(str(error)))


def free_bytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return float("inf")


def damaged(file: Path, why: str) -> InputError:
    """The error for a file whose contents differ from the saved ones."""
    return bad(
        f"the file '{file}', which is damaged ({why})",
        "an undamaged checkpoint",
        f"rm -r {shlex.quote(str(file.parent))}, then the same command, from the checkpoint before",
    )


@contextmanager
def reading(file: Path) -> Iterator[Path]:
    """Any error in the block is an InputError about the file: a damaged one can raise any error."""
    try:
        yield file
    except InputError:
        raise
    except OSError as error:
        raise _unread(file, error) from None
    except Exception as error:  # noqa: BLE001
        raise damaged(file, f"{type(error).__name__}: {error}".splitlines()[0]) from None


def _unread(file: Path, error: OSError) -> InputError:
    """A file is damaged only if it is missing or no regular one; else its contents may be right."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return damaged(file, "it is not there" if error.errno == errno.ENOENT else why)
    return bad(
        f"the file '{file}', which cannot be read ({why})",
        "a checkpoint whose files this process may read, on every rank",
        f"ls -l {shlex.quote(str(file.parent))}, and the same command when the file can be read",
    )
