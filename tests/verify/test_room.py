"""`verify` with a bound on the device's memory that its steps exceed."""

import re

import pytest

from shardwise.core.errors import InputError
from shardwise.core.plan import Plan
from shardwise.models.registry import find
from shardwise.prediction.peak import device_peak_bytes
from shardwise.verify.command import verify
from shardwise.verify.parity import theory_of


def answer(share: float) -> str:
    """What verify says of a bound that is this share of the predicted peak."""
    model, plan = find("gpt"), Plan.parse("dp1 fp32")
    theory = theory_of(model, plan, 0)(model.batch(2, 0))
    bound = int(share * device_peak_bytes(theory))
    with pytest.raises(InputError, match="the least bound that can be met") as caught:
        verify(f"{plan} device_memory:{bound}B", steps=1)
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.01, 0.8])
def test_a_bound_that_a_step_exceeds_is_one_paragraph_with_the_least_that_can_be_met(share: float):
    """Below the prediction, before ranks start."""
    assert re.search(r"Write instead: 'dp1 fp32 offload:param device_memory:\d+KiB'", answer(share))


@pytest.mark.full
def test_the_least_bound_is_met():
    """The plans that the error proposes hold."""
    proposed = re.findall(r"'([^']+)'", answer(0.01).partition("Write instead: ")[2])
    assert len(proposed) == 2
    for plan in proposed:
        assert verify(plan, steps=1).holds
