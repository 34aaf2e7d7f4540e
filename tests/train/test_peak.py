"""The peak: the best of rounds that the ranks begin together, and never below what was done."""

import pytest
import torch

from shardwise.train import peak
from shardwise.train.peak import Peak, measured_peak


def test_a_step_above_the_peak_is_the_new_peak() -> None:
    """No step has used more than all of the machine; later ones are a share of what it showed."""
    best = Peak(100.0)
    assert best.share(50.0) == 0.5
    assert best.share(200.0) == 1.0
    assert best.share(50.0) == 0.25
    assert best.flops == 200.0


def test_the_best_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that something else has for all products but one has the peak of that one."""
    times = iter([9.0, 8.0, 7.0, 2.0] + [9.0] * 99)
    begun: list[int] = []
    monkeypatch.setattr(peak, "_one_s", lambda *_: next(times))
    found = measured_peak(torch.device("cpu"), torch.float32, lambda: begun.append(1))
    assert found == 2 * peak.SIZES["cpu"] ** 3 / 2.0
    assert len(begun) == peak.ROUNDS
