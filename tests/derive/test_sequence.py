"""The `sequence` entries that are derived for sp hold, or the reason against sp is said."""

import pytest

from shardwise.core.errors import InputError
from shardwise.verify.proof_options import Options
from tests.derive.test_derive import HAND, SEQUENCE, derived, run
from tests.verify.test_command import shortly

ENTRIES = {
    f"{HAND}:tied": {"embed": "vocabulary:sequence", "norm": "sequence"},
    f"{HAND}:packed": {
        "body.*.inner": "gather",
        "embed": "vocabulary:sequence",
        "norm": "sequence",
    },
    f"{HAND}:convolution": {"body.after": "split", "norm": "sequence"},
    "gpt": {
        "blocks.*.attn": "gather",
        "blocks.*.mlp": "gather",
        "embed": "vocabulary:sequence",
        "blocks.*.attn_norm": "sequence",
        "blocks.*.mlp_norm": "sequence",
        "norm": "sequence",
    },
}


def holds(name: str, ranks: int = 2) -> bool:
    table = derived(name, ranks, sp=True).table
    return shortly(f"tp{ranks} sp fp64", name, Options(table=table)).holds


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRIES)
def test_the_entries_are_derived(name: str):
    """The embedding or a module splits the stream, norms act on shards, attention gathers."""
    table = derived(name, sp=True).table
    assert dict(table.sequence) == ENTRIES[name]


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRIES)
def test_a_model_written_by_hand_holds(name: str):
    """Parity, bytes and memory of tp2 sp."""
    assert holds(name)


@pytest.mark.full
@pytest.mark.parametrize("kind", SEQUENCE)
def test_an_architecture_holds(kind: str):
    """Parity, bytes and memory of tp2 sp, of models of transformers."""
    pytest.importorskip("transformers")
    assert holds(f"hf:{kind}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("encoder_decoder", "flip in body mixes positions between the sharded layers"),
        ("recurrent", "no pair of sharded layers is given the positions"),
        ("chain", "no embedding shows which dim has the positions"),
    ],
)
def test_what_is_not_understood_is_refused(name: str, why: str):
    """With the operation or the module that is in the way."""
    with pytest.raises(InputError, match=f"^Given: sp of a .*{why}"):
        derived(f"{HAND}:{name}", sp=True)


@pytest.mark.full
def test_the_command_prints_the_entries(capsys: pytest.CaptureFixture[str]):
    """`shardwise table MODEL --tp 2 --sp` has a section [sequence]; verify derives it."""
    code, printed = run(capsys, "table", f"{HAND}:tied", "--tp", "2", "--sp")
    assert code == 0
    assert '[sequence]\n"embed" = "vocabulary:sequence"\n"norm" = "sequence"\n' in printed.out
    assert run(capsys, "verify", "tp2 sp", "--model", f"{HAND}:tied")[0] == 0
