"""Plan text: what it says, that it round-trips, and what is answered to what it cannot say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.mesh import AXES
from shardwise.core.plan.plan import WORDS, Plan, words_table
from shardwise.core.plan.run_words import PRECISIONS
from shardwise.core.plan.word_values import size_text
from shardwise.core.schedule.library import LIBRARY
from shardwise.core.zero import ROWS
from shardwise.techniques.offload.word import BY_FRACTION, WHAT

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
    offload=st.none() | st.sampled_from([*WHAT, BY_FRACTION, "optim=0.00001", "optim-delayed=3"]),
    buffers_bytes=st.none() | COUNTS,
    stages=st.none() | st.lists(COUNTS, min_size=1).map(tuple),
)


@given(PLANS)
def test_text_round_trips(plan: Plan):
    """A plan is what its text says."""
    assert Plan.parse(str(plan)) == plan


@given(PLANS, st.randoms())
def test_order_of_words_is_free(plan: Plan, random):
    """The same words in any order are the same plan, with the same text."""
    words = str(plan).split()
    random.shuffle(words)
    again = Plan.parse("  ".join(words))
    assert again == plan
    assert str(again) == str(plan)
    assert hash(again) == hash(plan)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", "ddp"),
        ("ddp dp2", "dp2"),
        ("fsdp dp2", "dp2 zero3"),
        ("dp2 tp2 pp2 zero1 1f1b:8 bf16", "pp2 dp2 tp2 zero1 1f1b:8 bf16"),
        ("dp2 accumulate:1 bucket:25MiB", "dp2"),
        ("bucket:2048KiB accumulate:4 dp_shard2 zero2 dp_replicate3", None),
        ("dp02 accumulate:04 interleaved:08x02 bucket:01GiB", None),
        ("naive sp recompute:full offload:optim buffers:64MiB", None),
    ],
)
def test_canonical_text(text: str, canonical: str | None):
    """Axes come outermost first, defaults are left out, other names give way to the row's own."""
    expected = {
        "bucket:2048KiB accumulate:4 dp_shard2 zero2 dp_replicate3": (
            "dp_replicate3 dp_shard2 zero2 accumulate:4 bucket:2MiB"
        ),
        "dp02 accumulate:04 interleaved:08x02 bucket:01GiB": (
            "dp2 interleaved:8x2 accumulate:4 bucket:1GiB"
        ),
        "naive sp recompute:full offload:optim buffers:64MiB": (
            "sp naive recompute:full offload:optim buffers:64MiB"
        ),
    }.get(text, canonical)
    assert str(Plan.parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "replicate", "shard", "size"),
    [
        ("", "dp", None, 1),
        ("dp4", "dp", None, 4),
        ("dp4 zero1", None, "dp", 4),
        ("zero3", None, "dp", 1),
        ("dp_shard4 zero2", None, "dp_shard", 4),
        ("dp_replicate2 dp_shard4 zero3", "dp_replicate", "dp_shard", 8),
        ("dp2 tp2 zero3", None, "dp", 2),
    ],
)
def test_data_axes(text: str, replicate: str | None, shard: str | None, size: int):
    """Every row names the axis that repeats states and the axis that shards them."""
    plan = Plan.parse(text)
    assert (plan.replicate_axis, plan.shard_axis) == (replicate, shard)
    assert plan.data_axes == tuple(axis for axis in (replicate, shard) if axis is not None)
    assert plan.data_size == size
    assert plan.size == plan.mesh.size


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.form)
def test_every_word_of_the_table_is_read(word):
    """The example of each word is a plan, and the word stands in the printed table."""
    plan = Plan.parse(word.example)
    assert word.example in (*str(plan).split(), "ddp", "bucket:25MiB")
    assert f"\n{word.form} " in words_table()


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("dp2 zreo3", "zero3 for 'zreo3'"),
        ("dp2 zero-3", "zero3 for 'zero-3'"),
        ("zero4", "zero3 for 'zero4'"),
        ("DP2", "dp2 for 'DP2'"),
        ("dpp2", "dp2 for 'dpp2'"),
        ("tpp2", "tp2 for 'tpp2'"),
        ("FSDP2", "fsdp for 'FSDP2'"),
        ("bfloat16", "bf16 for 'bfloat16'"),
        ("fp-16", "fp16 for 'fp-16'"),
        ("1F1B:4", "1f1b:8 for '1F1B:4'"),
        ("gpip:8", "gpipe:8 for 'gpip:8'"),
        ("accum:4", "accumulate:4 for 'accum:4'"),
        ("hello", "dp2 zero3, to shard"),
        (",", "dp2 zero3, to shard"),
        ("dp0", "dp2, or leave dp out"),
        ("dp-4", "dp2, or leave dp out"),
        ("tp=2", "tp2, or leave tp out"),
        ("dp_shard", "dp_shard2, or leave dp_shard out"),
        ("dp" + "9" * 5000, "dp2, or leave dp out"),
        ("dp1000000000000000000000", "dp2, or leave dp out"),
        ("pp1000000001", "pp2, or leave pp out"),
        ("1f1b:99999999999999999999", "1f1b:8"),
        ("interleaved:4x10000000000", "interleaved:8x2"),
        ("accumulate:1000000001", "accumulate:4"),
        ("bucket:99999999999999999999GiB", "bucket:25MiB"),
        ("buffers:1025GiB", "buffers:25MiB"),
        ("1f1b", "1f1b:8"),
        ("1f1b:0", "1f1b:8"),
        ("gpipe:8x2", "gpipe:8"),
        ("interleaved:8", "interleaved:8x2"),
        ("naive:4", "naive"),
        ("accumulate", "accumulate:4"),
        ("accumulate:-1", "accumulate:4"),
        ("bucket:25MB", "bucket:25MiB"),
        ("bucket:4g", "bucket:25MiB"),
        ("bucket:0MiB", "bucket:25MiB"),
        ("buffers:much", "buffers:25MiB"),
        ("recompute", "recompute:full"),
        ("recompute:every1", "recompute:full"),
        ("recompute:8GB", "recompute:25MiB"),
        ("recompute:a,,b", "recompute:full"),
        ("offload:", "offload:optim"),
        ("offload:optimizer", "offload:optim"),
        ("offload:optim@tape", "offload:optim@disk"),
        ("offload:optim@nvme", "offload:optim@disk"),
        ("offload:param@nvme", "offload:param@disk"),
        ("offload:optim@host", "offload:optim"),
        ("offload:param@cpu", "offload:param"),
        ("offload:nvme", "offload:optim@disk"),
        ("offload:param=0.5", "offload:param"),
        ("offload:optim@disk=0.5", "offload:optim@disk"),
        ("offload:optim=0.5@disk", "offload:optim=0.5"),
        ("offload:optim=0.9,disk=0.5", "offload:optim=0.5"),
        ("offload:optim,disk=0.5", "offload:optim"),
        ("offload:optim-delayed@disk", "offload:optim-delayed"),
        ("offload:optim=0", "offload:optim=0.5"),
        ("offload:optim=1.5", "offload:optim=0.5"),
        ("offload:optim=half", "offload:optim=0.5"),
        ("offload:optim-delayed=soon", "offload:optim-delayed=40"),
        ("dp2 dp2", "dp2 once"),
        ("dp2 dp4", "dp2 alone or dp4 alone"),
        ("zero1 zero3", "zero1 alone or zero3 alone"),
        ("fsdp zero3", "fsdp alone or zero3 alone"),
        ("bf16 fp32", "bf16 alone or fp32 alone"),
        ("accumulate:2 accumulate:4", "accumulate:2 alone or accumulate:4 alone"),
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
    """One reading answers every bad word, so that the second try can be the last."""
    with pytest.raises(InputError) as caught:
        Plan.parse("dp0 zero1 zero2 accumulate:x bf61 fp9 tp2")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("4 things are wrong with the plan 'dp0 zero1")
    assert [line[:3] for line in lines[1:]] == ["1. ", "2. ", "3. ", "4. "]
    assert "bf16 for 'bf61'" in lines[4]
    assert "'fp9'" in lines[4]


@pytest.mark.parametrize(
    "values",
    [
        {"row": "zero4"},
        {"accumulate": 0},
        {"bucket_bytes": 0},
        {"bucket_bytes": -4},
        {"buffers_bytes": 0},
        {"schedule": "gpipe"},
        {"recompute": ""},
        {"offload": "a b"},
        {"axes": (("dp", 0),)},
        {"axes": (("xx", 2),)},
        {"axes": (("dp", 2), ("dp", 4))},
    ],
    ids=str,
)
def test_values_obey_the_words(values):
    """A plan made from values is held to what words can say."""
    with pytest.raises(InputError, match="Write instead: "):
        Plan(**values)


def answer(text: str) -> str:
    """What the parser says of a text: the plan's own text, or the error's."""
    try:
        plan = Plan.parse(text)
    except InputError as error:
        return str(error)
    assert Plan.parse(str(plan)) == plan
    return f"Write instead: {plan}"


@given(st.text(max_size=20))
def test_any_text_is_a_plan_or_an_input_error(text: str):
    """No text makes the parser fail in any other way."""
    assert "Write instead: " in answer(text)


@given(st.lists(st.sampled_from([w.example for w in WORDS] + ["dp", ":", " ", "x", "0", "8x"])))
def test_any_words_are_a_plan_or_an_input_error(pieces: list[str]):
    """Nor does any text made of pieces of words."""
    assert "Write instead: " in answer("".join(pieces))


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1B"), (1024, "1KiB"), (25 * 2**20, "25MiB"), (2**30 + 1, "1073741825B")]
)
def test_size_text(size: int, text: str):
    """A size is printed in the largest unit that leaves it whole."""
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("text", "ranks", "completed"),
    [
        ("zero3", 4, "dp4 zero3"),
        ("zero3", 1, "zero3"),
        ("tp2 zero1", 6, "dp3 tp2 zero1"),
        ("pp2 1f1b:4", 2, "pp2 1f1b:4"),
        ("pp2 1f1b:4", 8, "pp2 dp4 1f1b:4"),
        ("tp2", 3, "tp2"),
        ("dp2 zero3", 4, "dp2 zero3"),
        ("dp1 zero3", 4, "dp1 zero3"),
        ("dp_shard2 zero3", 4, "dp_shard2 zero3"),
        ("zero3", None, "dp2 zero3"),
        ("ddp", None, "dp2"),
        ("tp2", None, "tp2"),
        ("tp2 zero1", None, "dp2 tp2 zero1"),
        ("dp1", None, "dp1"),
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
