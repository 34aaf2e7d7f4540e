"""Plan text: what it says, that it round-trips, and what cannot be said or cannot run."""

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.mesh import AXES
from shardwise.core.plan.plan import WORDS, Plan, words_table
from shardwise.core.plan.plan_check import problems, require
from shardwise.core.plan.words import PRECISIONS
from shardwise.core.schedule.library import LIBRARY
from shardwise.core.zero import ROWS
from shardwise.techniques.offload.word import WHAT

COUNTS = st.integers(1, 10**6)
TEXTS = {"": "{}", "M": "{}:{}", "MxV": "{}:{}x{}"}
SCHEDULE_TEXTS = st.tuples(st.sampled_from(sorted(LIBRARY)), COUNTS, COUNTS).map(
    lambda drawn: TEXTS[LIBRARY[drawn[0]].numbers].format(*drawn)
)
RECOMPUTED = st.sampled_from(["full", "selective", "every2", "blocks.*.mlp", "a.0,b.[12],head"])
PLANS = st.builds(
    Plan,
    axes=st.dictionaries(st.sampled_from(AXES), COUNTS).map(lambda sizes: tuple(sizes.items())),
    row=st.sampled_from([*ROWS, "fsdp"]),
    precision=st.none() | st.sampled_from(PRECISIONS),
    accumulate=COUNTS,
    bucket_bytes=COUNTS | COUNTS.map(lambda n: n * 2**20),
    schedule=st.none() | SCHEDULE_TEXTS,
    sp=st.booleans(),
    recompute=st.none() | RECOMPUTED,
    offload=st.none() | st.sampled_from([*WHAT, "optim-delayed=3"]),
    buffers_bytes=st.none() | COUNTS,
    stages=st.none() | st.lists(COUNTS, min_size=1).map(tuple),
)


@given(PLANS, st.randoms())
def test_text_round_trips_in_any_order_of_words(plan: Plan, random: Any):
    """A plan is what its text says; the same words in any order are the same plan."""
    words = str(plan).split()
    random.shuffle(words)
    again = Plan.parse("  ".join(words))
    assert again == plan == Plan.parse(str(plan))
    assert (str(again), hash(again)) == (str(plan), hash(plan))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", "ddp"),
        ("ddp dp2", "dp2"),
        ("fsdp dp2", "dp2 zero3"),
        ("dp2 tp2 pp2 zero1 1f1b:8 bf16", "pp2 dp2 tp2 zero1 1f1b:8 bf16"),
        ("dp2 accumulate:1 bucket:25MiB", "dp2"),
        ("dp02 interleaved:08x02 bucket:2048KiB", "dp2 interleaved:8x2 bucket:2MiB"),
        ("recompute:1024MiB", "recompute:1GiB"),
    ],
)
def test_canonical_text(text: str, canonical: str):
    """Axes come outermost first, defaults are left out, other names give way to the row's own."""
    assert str(Plan.parse(text)) == canonical


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.form)
def test_every_word_of_the_table_is_read(word: Any):
    """The example of each word is a plan, and the word stands in the printed table."""
    plan = Plan.parse(word.example)
    assert word.example in (*str(plan).split(), "ddp", "bucket:25MiB")
    assert f"\n{word.form} " in words_table()


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("dp2 zreo3", "zero3 for 'zreo3'"),
        ("bfloat16", "bf16 for 'bfloat16'"),
        ("hello", "dp2 zero3, to shard"),
        ("dp0", "dp2, or leave dp out"),
        ("1f1b", "1f1b:8"),
        ("interleaved:8", "interleaved:8x2"),
        ("naive:4", "naive"),
        ("accumulate", "accumulate:4"),
        ("bucket:25MB", "bucket:25MiB"),
        ("recompute:every1", "recompute:full"),
        ("recompute:8GB", "recompute:25MiB"),
        ("recompute:a,,b", "recompute:full"),
        ("offload:optimizer", "offload:optim"),
        ("offload:param=0.5", "offload:param"),
        ("offload:optim=0.5", "offload:optim"),
        ("offload:optim-delayed=soon", "offload:optim-delayed"),
        ("dp2 dp2", "dp2 once"),
        ("fsdp zero3", "fsdp alone or zero3 alone"),
    ],
)
def test_bad_words(text: str, instead: str):
    """Each bad word is named, with what is allowed and the word to write."""
    with pytest.raises(InputError) as caught:
        Plan.parse(text)
    given, allowed, write = str(caught.value).partition(". Allowed: ")
    assert given.startswith("Given: ")
    assert text.rpartition(" ")[2] in given
    assert allowed
    assert f". Write instead: {instead}" in write


def test_everything_is_answered_at_once():
    """One error lists all unknown words of a plan, and another all of its contradictions."""
    with pytest.raises(InputError) as caught:
        Plan.parse("dp0 zero1 zero2 accumulate:x bf61 fp9 tp2")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("4 things are wrong with the plan 'dp0 zero1")
    assert [line[:3] for line in lines[1:]] == ["1. ", "2. ", "3. ", "4. "]
    assert "bf16 for 'bf61'" in lines[4]
    with pytest.raises(InputError) as caught:
        Plan.parse("hello")
    offered = str(caught.value).partition(". Allowed: ")[2].partition(". Write")[0].split()
    assert {word.form for word in WORDS} <= set(offered)
    with pytest.raises(InputError, match="2 things are wrong with the plan 'pp2 dp2 ep3 tp2 cp2"):
        require(Plan.parse("dp2 tp2 pp2 zero1 1f1b:8 bf16 sp cp2 ep3"), 4)


@pytest.mark.parametrize("words", ["dp2 ", "xx "])
def test_a_mistake_made_often_is_said_once(words: str):
    """A plan of five thousand equal words."""
    with pytest.raises(InputError, match="Given: ") as caught:
        Plan.parse(words * 5000)
    assert str(caught.value).count(words.strip()) < 5 and "\n" not in str(caught.value)


PIECES = st.lists(st.sampled_from([w.example for w in WORDS] + ["dp", ":", " ", "x", "0", "8x"]))


@given(st.text(max_size=20) | PIECES.map("".join))
def test_any_text_is_a_plan_or_an_input_error(text: str):
    """No text, and no text of pieces of words, makes the parser fail in any other way."""
    with suppress(InputError):
        plan = Plan.parse(text)
        assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "ranks", "completed"),
    [
        ("zero3", 4, "dp4 zero3"),
        ("zero3", 1, "zero3"),
        ("tp2 zero1", 6, "dp3 tp2 zero1"),
        ("pp2 1f1b:4", 8, "pp2 dp4 1f1b:4"),
        ("tp2", 3, "tp2"),
        ("dp1 zero3", 4, "dp1 zero3"),
        ("dp_shard2 zero3", 4, "dp_shard2 zero3"),
        ("ddp", None, "dp2"),
        ("tp2", None, "tp2"),
        ("tp2 zero1", None, "dp2 tp2 zero1"),
        ("zero3 | head: tp4", None, "dp4 zero3 | head: tp4"),
    ],
)
def test_the_data_ranks_are_what_the_world_leaves_over(
    text: str, ranks: int | None, completed: str
):
    """An open plan gets `dp`; one that names a data axis, or does not fit, stays what it is."""
    assert str(Plan.parse(text).completed(ranks)) == completed


@given(PLANS, st.integers(1, 64))
def test_a_completed_plan_round_trips_and_stays(plan: Plan, times: int):
    """A completed plan has the size of the world; completing it again changes nothing."""
    done = plan.completed(plan.size * times)
    assert done.size == plan.size * times or not plan.open
    assert Plan.parse(str(done)) == done == done.completed(plan.size * times)


# --- plans of single layers -----------------------------------------------------------------------

LAYERS = "dp4 zero3 | embed,head: tp4 zero1 | blocks.0-2: dp2 tp2 recompute:full"


def test_plans_of_layers_round_trip_and_inherit():
    """Own words replace those of the model; own axes replace all of the model's but pp."""
    plan = Plan.parse(LAYERS.replace("dp2 tp2", "tp2 dp2"))
    assert str(plan) == LAYERS
    assert Plan.parse(LAYERS) == plan and hash(Plan.parse(LAYERS)) == hash(plan)
    inherited = ["dp4 zero3", "tp4 zero1", "dp2 tp2 zero3 recompute:full"]
    assert [str(plan.of_layers(number)) for number in range(3)] == inherited
    assert str(Plan.parse("pp2 dp4 | a: tp2").of_layers(1)) == "pp2 dp2 tp2"


def test_names_and_axes_of_plans_of_layers():
    """A name belongs to the first plan that matches it or a module around it; axes have numbers."""
    plan = Plan.parse(LAYERS)
    names = {
        0: ("blocks.3", "norm.weight", "embedding"),
        1: ("embed", "embed.weight", "head.bias"),
        2: ("blocks.0", "blocks.2.mlp.up.weight"),
    }
    for number, of in names.items():
        assert {plan.layer_of(name) for name in of} == {number}
    assert [plan.size_of(axis) for axis in ("dp", "tp.1", "dp.2", "tp.2")] == [4, 4, 2, 2]
    here = plan.coordinate(3)
    assert [here[axis] for axis in ("dp", "tp.1", "dp.2", "tp.2")] == [3, 3, 1, 1]


# --- which plans can run --------------------------------------------------------------------------


PROBLEMS = [
    ("dp2", 4, "needs 2 processes (dp2), where 4 run", "start 2 processes, or leave the data"),
    ("dp2 zero3", 1, "where 1 runs", "start 2 processes"),
    ("dp1 zero3", 2, "needs 1 process (dp1)", "start 1 process"),
    ("dp_replicate2 dp_shard2 zero3", 8, "(dp_replicate2*dp_shard2)", "start 4 processes"),
    ("dp2 dp_shard2 zero3", None, "'dp2 dp_shard2', which splits", "dp4 in place of dp2"),
    ("dp2 dp_replicate2", None, "'dp_replicate2 dp2', which splits", "dp4"),
    ("dp_replicate2 zero3", None, "'dp_replicate2' without dp_shard", "dp2"),
    ("dp_replicate2", None, "'dp_replicate2' under the row ddp", "dp2"),
    ("dp_shard2", None, "'dp_shard2' under the row ddp", "dp2"),
    ("tp3", 2, "needs 3 processes or a multiple (tp3), where 2 run", "start 3 processes"),
    ("pp2 interleaved:3x2", None, "3 microbatches for interleaved", "interleaved:4x2"),
    ("pp4 dualpipe-v:4", None, "4 microbatches for DualPipe-V on 4 ranks", "dualpipe-v:8"),
    ("dp4 zero3 | head: tp4 zero1", 3, "where 3 run", "start 4"),
    ("dp2 cp2", 3, "needs 4 processes (dp2*cp2), where 3 run", "start 4"),
    ("ep2", 3, "'ep2' with dp3", "ep1"),
    ("dp_replicate4 dp_shard2 ep4 zero3", None, "'ep4' with dp_shard2", "ep2"),
    ("dp4 ep2", 6, "needs 4 processes (dp4)", "start 4"),
    ("pp2 pipedream:8 fp16", None, "fp16 with pipedream:8, which updates", "pipedream:8 bf16'"),
    ("pp2 2bw:4 accumulate:2", None, "accumulate:2 with 2bw:4", "'pp2 2bw:4'"),
    ("pp2 dp2 zero3 pipedream:4", None, "zero3 with pipedream:4", "'pp2 dp2 zero2 pipedream:4'"),
    ("pp4 2bw:2", None, "2 microbatches a batch for 2BW on 4 ranks", "2bw:4"),
    ("dp2 sp zero1", None, "'sp' without tensor parallelism", "the plan without sp, or tp2"),
    ("pp2 2bw:4 offload:optim", None, "offload:optim with 2bw:4", "'pp2 2bw:4'"),
    ("dp2 zero1 offload:param", None, "with zero1, which keeps all", "'dp2 zero3 offload:param'"),
    ("dp2 buffers:1KiB", None, "'buffers:1KiB' with 2 ranks on an axis", "buffers:1536B"),
    ("zero1 buffers:2KiB", 4, "'buffers:2KiB' with 4 ranks on an axis", "buffers:2560B"),
    # of layers
    ("dp4 | embed: dp2 tp4", None, "dp2*tp4, of 4 ranks", "'embed: tp4'"),
    ("dp6 | a: tp2 | b: tp3", None, "tp2 and layers with tp3", ""),
    ("dp2 tp2 sp | a: tp4", None, "'sp'", ""),
    ("dp4 zero3 arenas | a: tp2", None, "'arenas'", ""),
    ("dp4 zero3 tile:4 | a: tp2", None, "'tile:4'", ""),
    ("dp4 | a: offload:optim@disk", None, "'offload:optim@disk'", ""),
    ("dp4 | a: recompute:1GiB", None, "'recompute:1GiB'", ""),
    ("dp2 pp2 pipedream:4 | a: tp2", None, "'pipedream:4'", ""),
    ("dp4 zero3 | a: zero1 offload:param", None, "in the plan of the layers a", ""),
]


@pytest.mark.parametrize(("text", "world", "given", "instead"), PROBLEMS)
def test_one_problem(text: str, world: int | None, given: str, instead: str):
    """Each thing that cannot run is one problem that names it and the line to write."""
    [problem] = problems(Plan.parse(text), world)
    assert given in problem.given and instead in problem.instead
    with pytest.raises(InputError, match=re.escape(str(problem))):
        require(Plan.parse(text), world)
