"""The largest model that trains in a bounded device memory, with and without offload."""

from dataclasses import replace

import pytest

from shardwise.bench import largest
from shardwise.bench.largest import Room, covered
from shardwise.core.errors import InputError
from shardwise.models.gpt import GPTConfig
from shardwise.prediction.peak import device_peak_bytes

SMALL = GPTConfig(
    vocabulary=64, layers=1, width=64, heads=2, kv_heads=2, hidden=192, sequence=16, tied=False
)
DEVICE_BYTES = 7 * 2**19
ROOM = Room(
    DEVICE_BYTES, 4 * 2**20, SMALL, rows=2, device="cpu", words=f"device_memory:{DEVICE_BYTES}B"
)


def found(words: str, room: Room = ROOM) -> largest.LargestLine:
    return largest.largest(words, room, rounds=1)


def test_offload_trains_larger_models():
    """Each step runs within the bound, and a model of twice the layers is predicted not to."""
    lines = [found(words) for words in largest.WORDS]
    none, optim, param = (line.layers for line in lines)
    assert none < param < optim  # the host is full; it has the parameters too
    for line, words in zip(lines, largest.WORDS, strict=True):
        assert line.predicted_bytes <= ROOM.device_bytes
        more = largest.predicted(words, ROOM, 2 * line.layers)
        on_host = sum(more.host_memory.values())
        assert device_peak_bytes(more) > ROOM.device_bytes or on_host > ROOM.host_bytes
    assert 0.5 < lines[0].share <= 1.0
    assert "offload:param" in largest.as_text(lines)


def test_a_step_that_runs_out_of_memory_takes_fewer_layers():
    """The prediction is for more memory than there is: layers are taken away until a step runs."""
    much = replace(ROOM, device_bytes=5 * 2**20)
    assert largest.most_layers(lambda n: largest.predicted("", much, n), much) > 4
    assert found("", much).layers in (3, 4)
    assert found("", replace(ROOM, words="device_memory:20000B")).layers == 0


def test_the_part_of_copies_beside_kernels():
    """Kernels that overlap count once."""
    assert covered([(0.0, 10.0)], [(1.0, 3.0), (2.0, 4.0), (8.0, 20.0)]) == pytest.approx(0.5)
    assert covered([(0.0, 1.0), (5.0, 6.0)], [(5.0, 7.0)]) == pytest.approx(0.5)
    assert covered([(0.0, 1.0)], []) == 0.0
    assert covered([], [(0.0, 1.0)]) is None


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The error has the command that runs without one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="bench offload --device cpu"):
        largest.run(None)
