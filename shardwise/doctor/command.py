"""The command `shardwise doctor`, on the ranks that a launcher started, or on new ones."""

import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from shardwise.comm import disk_bandwidth
from shardwise.comm.launch import spawn
from shardwise.comm.local import require_local
from shardwise.comm.objects import all_gather_object
from shardwise.comm.rendezvous import environment
from shardwise.comm.world import World, init
from shardwise.core.arguments import choice, integer
from shardwise.core.errors import bad
from shardwise.core.mesh import Mesh
from shardwise.doctor import textbook, timing
from shardwise.doctor.diagnosis import Diagnosis, Finding
from shardwise.doctor.machine import look
from shardwise.doctor.picture import draw

MOST_MIB: Final = 1024


def examine(world: World, mesh: Mesh, most_bytes: int) -> Finding:
    """The finding of this rank; all ranks call it.  Messages have up to `most_bytes` bytes."""
    world = world.on(mesh)
    axes = [world.axis(name) for name, size in mesh.axes if size > 1]
    sizes = [numel for numel in timing.SIZES if 4 * numel <= most_bytes] or timing.SIZES[:1]
    return Finding(
        look(),
        {axis.name: textbook.check(axis, world.device) for axis in axes},
        [one for axis in axes for one in timing.measure(axis, world.device, sizes)],
        timing.pairs(world.everyone, world.device) if world.size > 1 else {},
    )


def _on_rank(mesh: str, device: str, most_bytes: int) -> Finding:
    world = init(device)
    found = examine(world, Mesh.parse(mesh), most_bytes)
    world.barrier()
    return found


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `shardwise doctor`."""

    ranks: Annotated[int | None, typer.Option(help="Processes; 4, or one for each GPU.")] = None
    mesh: Annotated[str | None, typer.Option(help='Axes to measure, such as "dp2 tp2".')] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    disk_folder: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure this folder's disk.")
    ] = None
    most: Annotated[int, typer.Option("--mib", help="The longest message, in MiB.")] = 16
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the links to a TOML file.")
    ] = None
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time over bytes, .png or .svg.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False


def doctor_command(**given: Any) -> None:
    """Look at the devices, check every collective, and measure the links."""
    asked = DoctorOptions(**given)
    choice("--device", asked.device, ("auto", "cpu", "cuda"))
    integer("--mib", asked.most, 1, 16, MOST_MIB)
    for option, file in (("--save", asked.save), ("--picture", asked.picture)):
        _writable(option, file)
    start = environment()
    gpus = torch.cuda.device_count()
    kind = ("cuda" if gpus > 1 else "cpu") if asked.device == "auto" else asked.device
    count = _count(
        asked.ranks, asked.mesh, start.size if start else None, gpus if kind == "cuda" else 4
    )
    if asked.device == "cuda" and not gpus:
        none = "--device cuda on a machine without a GPU that PyTorch sees"
        raise bad(none, "cuda with a GPU for each rank, or cpu", "--device cpu")
    axes = Mesh.parse(f"dp{count}" if asked.mesh is None else asked.mesh)
    _fits(axes, count)
    first = start is None or start.rank == 0
    folder = asked.disk_folder if first else None
    measured = None if folder is None else disk_bandwidth.measure(folder)
    if start is None:
        require_local(count)
        findings = spawn(_on_rank, count, (str(axes), kind, asked.most * 2**20), kind)
    else:
        world = init(None if asked.device == "auto" else asked.device)
        findings = all_gather_object(examine(world, axes, asked.most * 2**20), world)
    found = Diagnosis(str(axes), findings, measured)
    if not first:
        raise typer.Exit(1 if found.failures else 0)
    if asked.save is not None:
        asked.save.write_text(found.toml(), encoding="utf-8")
    if asked.picture is not None:
        draw(found, asked.picture)
    print(json.dumps(found.object(), indent=2) if asked.as_json else found.text())
    raise typer.Exit(1 if found.failures else 0)


# typer reads the options off a function's signature
doctor_command.__signature__ = inspect.signature(DoctorOptions)


def _count(ranks: int | None, mesh: str | None, started: int | None, usual: int) -> int:
    """The number of ranks: those that were started, or requested, or those of the mesh."""
    if ranks is not None:
        integer("--ranks", ranks, 1, 4)
    if started is not None:
        if ranks not in (None, started):
            given = f"--ranks {ranks} under a launcher that started {started}"
            raise bad(given, "no --ranks under torchrun or Slurm", "shardwise doctor")
        return started
    if ranks is not None:
        return ranks
    return max(1, usual) if mesh is None else Mesh.parse(mesh).size


def _fits(mesh: Mesh, ranks: int) -> None:
    if mesh.size != ranks:
        given = f"--mesh '{mesh}' of {mesh.size} ranks, with {ranks} ranks"
        raise bad(given, "axes whose sizes multiply to the number of ranks", f"--mesh dp{ranks}")


def _writable(option: str, file: Path | None) -> None:
    if file is None:
        return
    instead = f"{option} {'cluster.toml' if option == '--save' else 'doctor.png'}"
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        what = "a folder" if file.is_dir() else "in a folder that does not exist or is read-only"
        raise bad(f"{option} {file}, {what}", "a file in a folder that exists", instead)
    if option == "--picture" and file.suffix not in (".png", ".svg", ".pdf"):
        given = f"--picture {file}"
        raise bad(given, "a file that ends in .png, .svg or .pdf", instead)
