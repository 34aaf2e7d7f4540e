"""Operations per token do not grow with the number of experts."""

import runpy
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from shardwise.models import moe
from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.parallel.expert.gate import Gate

ROOT = Path(__file__).parents[2]
SIZES = GPTConfig(vocabulary=64, layers=1, width=64, heads=2, kv_heads=2, hidden=1024, sequence=16)


def counted(experts: int) -> tuple[int, int]:
    """What torch counts of a forward and backward pass, and what its routers take of that."""
    config = MoEConfig(SIZES, Gate("topk", experts=experts, k=2))
    model, rows = moe.MoEGPT(config), 4
    batch = moe.batch(rows, config, 0)
    with FlopCounterMode(display=False) as flops:
        moe.loss(model, batch).backward()
    routers = 3 * 2 * rows * SIZES.sequence * SIZES.width * experts * SIZES.layers
    return flops.get_total_flops(), routers


def test_operations_per_token_stay_as_experts_become_more():
    """From 4 to 64 experts at k = 2 a step has 1 % more at most, which are the routers'."""
    few, of_few = counted(4)
    many, of_many = counted(64)
    assert few - of_few == many - of_many
    assert many == pytest.approx(few, rel=0.01)


def test_the_example_prints_a_line_for_each_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """examples/expert_growth.py, with few tokens: the ratio of the first number is 1."""
    monkeypatch.setattr("sys.argv", ["expert_growth.py", "64"])
    runpy.run_path(str(ROOT / "examples" / "expert_growth.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[0]) for line in lines] == [4, 16, 64]
    assert lines[0][-1] == "1.00"
