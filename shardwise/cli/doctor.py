"""`shardwise doctor`, on the ranks that a launcher started, or on new ones."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from shardwise.comm import link_times
from shardwise.comm.move import all_gather_object
from shardwise.comm.start.launch import spawn
from shardwise.comm.start.rendezvous import environment, require_local
from shardwise.comm.tiers import disk_bandwidth
from shardwise.comm.world import World, init
from shardwise.core.errors import bad
from shardwise.core.mesh import Mesh
from shardwise.core.tools.arguments import choice, integer
from shardwise.doctor import collectives
from shardwise.doctor.device_speed import measure_device
from shardwise.doctor.diagnosis import Diagnosis, RankDiagnosis, look, measured_cluster
from shardwise.prediction.cluster import text_of

MOST_BYTES: Final = 2**24  # of a message


def examine(world: World, mesh: Mesh, most_bytes: int, *, devices: bool = False) -> RankDiagnosis:
    """This rank's results; all ranks call it. Messages have up to `most_bytes` bytes."""
    world = world.on(mesh)
    axes = [world.axis(name) for name, size in mesh.axes if size > 1]
    sizes = [numel for numel in collectives.SIZES if 4 * numel <= most_bytes] or collectives.SIZES[
        :1
    ]
    return RankDiagnosis(
        look(),
        {axis.name: collectives.check(axis, world.device) for axis in axes},
        [one for axis in axes for one in collectives.measure(world, axis, world.device, sizes)],
        link_times.pairs(world.everyone, world.device) if world.size > 1 else {},
        measure_device(world) if devices else None,
    )


def _on_rank(mesh: str, device: str, most_bytes: int, devices: bool) -> RankDiagnosis:
    world = init(device)
    found = examine(world, Mesh.parse(mesh), most_bytes, devices=devices)
    world.barrier()
    return found


def doctor_command(
    *,
    nproc: Annotated[int | None, typer.Option(help="Processes; 4, or one for each GPU.")] = None,
    mesh: Annotated[str | None, typer.Option(help='Axes to measure, such as "dp2 tp2".')] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda, which is the default with several GPUs.")
    ] = None,
    disk_folder: Annotated[
        Path | None, typer.Option("--disk", metavar="FOLDER", help="Measure this folder's disk.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure a cluster for `predict --cluster`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report devices, test each collective, and measure links.  --save writes a cluster file."""
    choice("--device", device or "cpu", ("cpu", "cuda"))
    if save is not None:
        with _written(save):  # before ranks are started
            save.open("a").close()
    start = environment()
    gpus = torch.cuda.device_count()
    kind = device or ("cuda" if gpus > 1 else "cpu")
    count = _count(nproc, mesh, start.size if start else None, gpus if kind == "cuda" else 4)
    axes = Mesh.parse(f"dp{count}" if mesh is None else mesh)
    if axes.size != count:
        given = f"--mesh '{axes}' of {axes.size} ranks, with {count} ranks"
        raise bad(given, "axes whose sizes multiply to the number of ranks", f"--mesh dp{count}")
    first = start is None or start.rank == 0
    folder = disk_folder if first else None
    measured = None if folder is None else disk_bandwidth.measure(folder)
    if start is None:
        require_local(count)
        findings = spawn(_on_rank, count, (str(axes), kind, MOST_BYTES, save is not None), kind)
    else:
        world = init(device)
        findings = all_gather_object(
            examine(world, axes, MOST_BYTES, devices=save is not None), world
        )
    found = Diagnosis(str(axes), findings, measured)
    if not first:
        raise typer.Exit(1 if found.failures else 0)
    if save is not None:
        with _written(save):
            save.write_text(text_of(measured_cluster(found)), encoding="utf-8")
    print(json.dumps(found.object(), indent=2) if as_json else found.text())
    raise typer.Exit(1 if found.failures else 0)


def _count(ranks: int | None, mesh: str | None, started: int | None, usual: int) -> int:
    if ranks is not None:
        integer("--nproc", ranks, 1, 4)
    if started is not None:
        if ranks not in (None, started):
            given = f"--nproc {ranks} under a launcher that started {started}"
            raise bad(given, "no --nproc under torchrun or Slurm", "shardwise doctor")
        return started
    if ranks is not None:
        return ranks
    return max(1, usual) if mesh is None else Mesh.parse(mesh).size


@contextmanager
def _written(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        given = f"--save {file}, which cannot be written ({error.strerror})"
        raise bad(given, "a file in a folder that exists", "--save cluster.toml") from None
