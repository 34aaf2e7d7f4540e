"""Code that a table must say more of: what goes wrong without, and that the entries mend it."""

import re
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import RankError
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks import hint
from shardwise.verify.parity import prove
from shardwise.verify.report import Report, report
from tests.pool import run_gloo

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after, self.norm = nn.Identity(), nn.Identity(), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        before = F.pad(self.before(x), (0, 0, 1, 0))[:, :-1]
        hidden = F.gelu(self.up(self.norm(x + self.after(before))))
        self.penalty = hidden.square().mean()
        return x + self.down(hidden)

class Plain(Block):
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, block, table, sequence):
        super().__init__()
        self.embed, self.block, self.seen = nn.Embedding(11, 6), block(), nn.Identity()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)
        styles = {"embed": "vocabulary", "block.up": "colwise", "block.down": "rowwise"}
        known = {"embed": "vocabulary:sequence", "*norm": "sequence"}
        self.tensor_table = sw.Table.of(styles | table, sequence=sequence | known)

    def forward(self, x):
        self.stream = self.block(self.embed(x))
        return self.head(self.norm(self.stream))

def each(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

def last(model, x):
    return F.cross_entropy(model(x)[:, 8], x[:, 0])

def stream(model, x):
    return each(model, x) + model.seen(model.stream).square().mean()

def hidden(model, x):
    return each(model, x) + model.block.penalty

def batch(rows, seed):
    return torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(seed))

WHOLE = {"head": "whole"}
AROUND = {"block.before": "sequence:join", "block.after": "split"}
JOINED = {"norm": "sequence:join", "head": "whole"}
BOTH = {"block.up": "colwise_gather_output", "block.down": "rowwise_split_input"}
CUT = {"head": "vocabulary"}

def shifted():
    return Model(Block, CUT, {}), each, batch
def shifted_mended():
    return Model(Block, CUT, AROUND), each, batch
def stream_mean():
    return Model(Plain, CUT, {}), stream, batch
def stream_mean_mended():
    return Model(Plain, CUT, {"seen": "sequence:join"}), stream, batch
def hidden_mean():
    return Model(Block, CUT, AROUND), hidden, batch
def hidden_mean_mended():
    return Model(Block, CUT | BOTH, AROUND), hidden, batch
def last_position():
    return Model(Plain, WHOLE, {"head": "sequence"}), last, batch
def last_position_mended():
    return Model(Plain, WHOLE, JOINED), last, batch
"""


def proved(tmp_path: Path, build: str, plan: str = "tp2 sp fp64") -> Report:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    read, name = Plan.parse(plan), f"{path}:{build}"
    return report(read, name, run_gloo(read.size, prove, read, name, 2))


@pytest.mark.full
def test_code_that_mixes_what_ranks_share_computes_something_else(tmp_path: Path):
    """All ranks go on from the same wrong numbers, which are not one process's: verify finds it."""
    assert not proved(tmp_path, "shifted").holds
    assert proved(tmp_path, "shifted_mended").holds


@pytest.mark.full
@pytest.mark.parametrize("build", ["stream_mean", "hidden_mean"])
def test_a_penalty_on_what_ranks_share_is_another_on_each(build: str, tmp_path: Path):
    """Each has the mean of its own part: the first step finds it."""
    with pytest.raises(RankError, match="a loss that differs between the ranks of the tp axis"):
        proved(tmp_path, build)
    assert proved(tmp_path, f"{build}_mended").holds


@pytest.mark.full
def test_a_shape_that_does_not_fit_is_told_what_the_table_may_lack(tmp_path: Path):
    """A last position is on no rank's shard; the note has the entry that mends it."""
    with pytest.raises(RankError) as error:
        proved(tmp_path, "last_position")
    assert "index 8 is out of bounds for dimension 1" in error.value.text
    assert (
        "no sequence:join for the norm before code that pools, picks or returns" in error.value.text
    )
    assert proved(tmp_path, "last_position_mended").holds


def test_where_nothing_is_cut_an_error_is_torchs_own():
    """A model that is on no tensor axis has no table that could lack anything."""
    with pytest.raises(RuntimeError) as error, hint.shapes(Plan.parse("dp2")):
        raise RuntimeError("shape '[2, 3]' is invalid for input of size 4")
    assert not hasattr(error.value, "__notes__")


OWN = """
from torch import nn

def untold():
    return nn.Linear(6, 6)

def table(**styles):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model.tensor_table = {name.strip("_"): style for name, style in styles.items()}
    return model

def misspelt():
    return table(_0="colwise", _2="rowise")

def nowhere():
    return table(_0="colwise", _2="rowwise", _3="rowwise")

def halved():
    return table(_0="colwise")

def narrow_table():
    model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 6))
    model.tensor_table = {"0": "colwise", "1": "rowwise"}
    return model
"""


@pytest.mark.parametrize(
    ("build", "phrase"),
    [
        ("untold", "tp2 of a Linear, of which no layer can be sharded"),
        ("misspelt", '"rowise".*"rowwise"'),
        ("nowhere", r'"3".*no module'),
        ("narrow_table", "0, which has 1 output features, on 2 ranks"),
    ],
)
def test_a_table_that_does_not_fit_is_answered_before_any_rank_is_started(
    build: str, phrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One paragraph for each fault, no traceback, and the command ends with 2."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(SystemExit) as leaving:
        main(["verify", "tp2", "--model", f"{path}:{build}"])
    said = capsys.readouterr().err.strip()
    assert leaving.value.code == 2
    assert re.search(phrase, said) and "Write instead:" in said and "Traceback" not in said


def test_a_result_that_stays_sharded_is_refused_by_torch_with_a_note(tmp_path: Path):
    """A whole layer after a colwise: shapes that do not fit, and what the table may lack."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(RankError) as error:
        run_gloo(2, prove, Plan.parse("tp2 fp64"), f"{path}:halved", 1)
    assert "shapes cannot be multiplied" in error.value.text
    assert "a colwise without the rowwise that takes its result" in error.value.text
