"""The largest model that trains in a room of the device, with and without offload."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import largest
from benchmarks.__main__ import bench_command
from benchmarks.fit import FILLED_HOST, Fit, Room, fraction, most_layers, predicted
from benchmarks.largest import covered
from shardwise.core.errors import InputError
from shardwise.models.gpt import GPTConfig
from shardwise.prediction.peak_memory import device_peak_bytes
from shardwise.prediction.prediction import Prediction

SMALL = GPTConfig(
    vocabulary=64, layers=1, width=64, heads=2, kv_heads=2, hidden=192, sequence=16, tied=False
)
DEVICE_BYTES = 7 * 2**19
MIB = 2**20
ROOM = Room(
    *(DEVICE_BYTES, 4 * MIB, 0, SMALL),
    rows=2,
    device="cpu",
    least_unit_bytes=1,
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a disk in 400 KiB of host memory."""
    monkeypatch.setattr("shardwise.core.chunks.CHUNK_NUMEL", 4096)


def found(offload: str | None, room: Room = ROOM) -> largest.LargestLine:
    return largest.largest(offload, room, rounds=1)


def held(prediction: Prediction) -> tuple[int, int, int]:
    """The bytes of a step on the device, on the host and on the disk."""
    host, disk = prediction.host_memory, prediction.disk_memory
    return device_peak_bytes(prediction), sum(host.values()), sum(disk.values())


@pytest.mark.full
def test_offload_trains_larger_models():
    """Each is predicted to fit and trains; a model of twice the layers is predicted not to fit."""
    lines = [found(offload) for offload in (None, "optim", "param")]
    none, optim, param = (line.layers for line in lines)
    assert none < param < optim  # the host is full; it has the parameters too
    for line, offload in zip(lines, (None, "optim", "param"), strict=True):
        assert line.predicted_bytes <= ROOM.device_bytes
        device, host, _ = held(predicted(offload, ROOM, 2 * line.layers))
        assert device > ROOM.device_bytes or host > ROOM.host_bytes
    assert 0.5 < lines[0].share <= 1.0
    assert "offload:param" in largest.as_text(lines)


@pytest.mark.full
def test_the_device_and_the_host_are_filled_with_whole_units():
    """More layers than all on the host, both full to one unit; one layer more fits in no way."""
    room = replace(ROOM, device_bytes=8 * MIB, host_bytes=6 * MIB)
    fit = most_layers(FILLED_HOST, room)
    assert most_layers("optim", room).layers < fit.layers
    used = held(predicted(fit.offload, room, fit.layers))
    a_layer = MIB
    for size, bound in zip(used, (8 * MIB, 6 * MIB), strict=False):
        assert bound - a_layer < size <= bound
    assert fraction(predicted("optim", room, fit.layers + 1), room) is None


@pytest.mark.full
@pytest.mark.usefixtures("small_chunks")
def test_a_model_on_a_disk_trains(tmp_path: Path):
    """With more layers than have their states in the host's memory."""
    room = replace(ROOM, host_bytes=2 * MIB, disk_bytes=4 * MIB, folder=str(tmp_path))
    line = found("optim@disk", room)
    assert line.contender == "offload:optim@disk"
    assert line.layers > found("optim", room).layers
    assert line.predicted_bytes <= room.device_bytes
    assert line.share == pytest.approx(
        16 * line.parameters / (room.device_bytes + room.host_bytes + room.disk_bytes)
    )


@pytest.mark.full
@pytest.mark.parametrize(("most", "layers"), [(4, (3, 4)), (0, (0,))])
def test_a_step_that_runs_out_of_memory_takes_fewer_layers(
    most: int, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """The prediction is for more memory than there is: layers are taken away until a step runs."""
    measured = largest.measured

    def bounded(fit: Fit, *given: Any) -> largest.LargestLine:
        if fit.layers > most:
            raise torch.OutOfMemoryError
        return measured(fit, *given)

    monkeypatch.setattr(largest, "measured", bounded)
    much = replace(ROOM, device_bytes=5 * MIB)
    assert most_layers(None, much).layers > 4
    assert found(None, much).layers in layers


@pytest.mark.full
def test_a_tier_without_room():
    """No layer fits on a host or a disk that cannot even have what is there without layers."""
    assert most_layers(FILLED_HOST, replace(ROOM, host_bytes=1000)) == Fit(0, FILLED_HOST)
    assert most_layers("optim", replace(ROOM, host_bytes=1000)).layers == 0
    assert most_layers("optim@disk", ROOM).layers == 0


def test_the_part_of_copies_beside_kernels():
    """Kernels that overlap count once."""
    assert covered([(0.0, 10.0)], [(1.0, 3.0), (2.0, 4.0), (8.0, 20.0)]) == pytest.approx(0.5)
    assert covered([(0.0, 1.0), (5.0, 6.0)], [(5.0, 7.0)]) == pytest.approx(0.5)
    assert covered([(0.0, 1.0)], []) == 0.0
    assert covered([], [(0.0, 1.0)]) is None


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The error has the command that runs without one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="benchmarks offload --device cpu"):
        largest.run(None, None)


def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Before anything is measured."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InputError, match="the folder /none, which is not there"):
        largest.run(Path("/none"), None)


def test_a_folder_without_a_gpu_is_refused(tmp_path: Path):
    """The error names both commands that read a folder."""
    with pytest.raises(
        InputError, match=r"benchmarks offload \S+ --device cuda, or python -m benchmarks disk"
    ):
        bench_command(["offload", str(tmp_path)])
