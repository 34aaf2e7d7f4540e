"""Tables of tensor parallelism: what they say, which modules they match, and how those are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import Cut
from shardwise.techniques.tensor.styles import STYLES, ModuleShape, Style
from shardwise.techniques.tensor.tensor_table import Table, assign, bias_cut, cuts, numbers

WORDS = [*(style for style in STYLES if style != "colwise:N"), "colwise:2", "colwise:12"]
NAMES = [
    "embed",
    "blocks",
    *(f"blocks.{i}{n}" for i in (0, 1) for n in ("", ".up", ".down")),
    "head",
]


@pytest.mark.parametrize("text", WORDS)
def test_styles_print_as_they_are_written(text: str):
    """`str` and `parse` are inverse, and what says the same is equal."""
    assert str(Style.parse(text)) == text
    assert Style.parse(text) == Style.parse(str(Style.parse(text)))


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("colwize", "colwise"),
        ("rowwise:head", "rowwise:heads"),
        ("Colwise", "colwise"),
        ("rowise_split_input", "rowwise_split_input"),
        ("replicated_with_grad_allreduce", "replicated"),
        ("colwise:1", "colwise"),
        ("colwise:0", "colwise"),
        ("colwise:N", "colwise"),
        ("sequence_parallel", "sequence"),
        (None, "colwise"),
    ],
)
def test_an_unknown_style_gets_the_nearest(text: str, near: str):
    """The answer has all styles and the one that looks most like what was written."""
    with pytest.raises(InputError, match="Write instead:") as error:
        Style.parse(text)
    told = str(error.value)
    assert all(style in told for style in STYLES)
    if text is not None:
        assert told.endswith(f'Write instead: "{near}".')


def full() -> Table:
    return Table.of(
        {"embed": "vocabulary", "blocks.*.up": "colwise:heads", "blocks.*.down": "rowwise:heads"},
        heads=4,
        kv_heads=2,
        sequence={"embed": "vocabulary:sequence"},
        sets={"blocks.*": {"num_heads": "heads", "n": "groups"}},
    )


def test_tables_are_values():
    """Tables of the same words are equal and hash alike, and print as what makes them."""
    assert full() == full()
    assert len({full(), full(), Table.of({})}) == 2
    assert eval(str(full())) == full()  # noqa: S307
    assert eval(str(Table.of({"a": "colwise"}))) == Table.of({"a": "colwise"})  # noqa: S307


def test_a_table_moves_with_its_model():
    """Under a name, every pattern begins with it, and all else is as it was."""
    moved = full().under("net")
    assert moved.styles[0] == ("net.embed", "vocabulary")
    assert moved.sequence == (("net.embed", "vocabulary:sequence"),)
    assert moved.sets[0][0] == "net.blocks.*"
    assert (moved.heads, moved.kv_heads) == (4, 2)
    assert full().under("") == full()


@pytest.mark.parametrize(
    ("styles", "more", "instead"),
    [
        ({"a": "colwis"}, {}, '"colwise"'),
        ({"a": "sequence"}, {}, 'sequence={"a": "sequence"}'),
        ({"a": "colwise"}, {"heads": 0}, "heads=8"),
        ({"a": "colwise"}, {"heads": True}, "heads=8"),
        ({"a": "colwise"}, {"heads": 8, "kv_heads": 2.0}, "kv_heads=8"),
        ({"a": "colwise"}, {"kv_heads": 2}, "heads=2, kv_heads=2"),
        ({"a": "colwise"}, {"sequence": {"a": "gahter"}}, '"gather"'),
        ({"a": "colwise"}, {"sets": {"a": {"n": "head"}}}, "{'n': 'heads'}"),
    ],
)
def test_a_table_that_says_nothing_sensible_is_refused(styles: dict, more: dict, instead: str):
    """Unknown words and numbers that count nothing are answered at once."""
    with pytest.raises(InputError) as error:
        Table.of(styles, **more)
    assert instead in str(error.value).split("Write instead:")[1]


def test_the_first_pattern_that_matches_wins():
    """Also where a later one says something else; * matches dots; "whole" exempts a module."""
    table = Table.of({"blocks.0.up": "whole", "*up": "colwise", "blocks.*": "rowwise"})
    found = {name: str(style) for name, style in assign(table, NAMES, sp=False).items()}
    assert found == {
        "blocks.0": "rowwise",
        "blocks.0.down": "rowwise",
        "blocks.1": "rowwise",
        "blocks.1.up": "colwise",
        "blocks.1.down": "rowwise",
    }


def test_entries_for_the_sequence_stand_first_under_sp():
    """They override the styles of the same modules, and are not there without sp."""
    assert str(assign(full(), NAMES, sp=True)["embed"]) == "vocabulary:sequence"
    assert str(assign(full(), NAMES, sp=False)["embed"]) == "vocabulary"


def test_an_optional_pattern_may_match_nothing():
    """A pattern that ends in ? is used where it matches and forgotten where not."""
    table = Table.of({"blocks.*.up?": "colwise", "blocks.*.gate?": "colwise"})
    assert list(assign(table, NAMES, sp=False)) == ["blocks.0.up", "blocks.1.up"]


@pytest.mark.parametrize(
    ("table", "sp", "told"),
    [
        (Table.of({"*": "whole", "blocks.*.upp": "colwise"}), False, ['"blocks.*.up"']),
        (Table.of({"*": "whole", "blocks.0.dwn": "colwise"}), False, ['"blocks.*.down"']),
        (Table.of({"*": "whole", "embd": "whole"}), False, ['"embed"', "embd?"]),
        (
            Table.of({"layers.*.fc": "colwise"}),
            False,
            ["without any pattern that matches", "blocks.*.down"],
        ),
        (Table.of({"gate?": "colwise"}), False, ["without any pattern that matches"]),
        (Table.of({}), False, ["without any pattern that matches"]),
        (Table.of({"*": "whole", "hed": "whole", "ebd": "whole"}), False, ["2 things", '"head"']),
        (
            Table.of({"*": "whole"}, 4, sets={"bloks.*": {"n": "heads"}}),
            False,
            ['"bloks.*" in', '"blocks'],
        ),
    ],
)
def test_a_pattern_that_matches_nothing_gets_the_nearest(table: Table, sp: bool, told: list[str]):
    """Every such pattern is named, with a name that the model has, all in one answer."""
    with pytest.raises(InputError) as error:
        assign(table, NAMES, sp)
    assert [text for text in told if text not in str(error.value)] == []


LINEAR = ModuleShape("linear", 12, 32, bias=True)
CONV1D = ModuleShape("linear", 12, 32, bias=True, transposed=True, numbers=(("nf", 32), ("nx", 12)))
EMBED = ModuleShape("embedding", 10, 12)
HEADS = Table.of({"a": "whole"}, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("style", "shape", "cut"),
    [
        ("colwise", LINEAR, Cut(0, 32, (((0, 10),), ((10, 21),), ((21, 32),)))),
        (
            "colwise:2",
            LINEAR,
            Cut(0, 32, (((0, 5), (16, 21)), ((5, 10), (21, 26)), ((10, 16), (26, 32)))),
        ),
        ("colwise:heads", LINEAR, Cut(0, 32, (((0, 16),), ((16, 24),), ((24, 32),)))),
        ("colwise:kv_heads", LINEAR, Cut(0, 32, (((0, 16),), ((16, 32),), ((16, 32),)))),
        (
            "colwise:qkv",
            LINEAR,
            Cut(
                0,
                32,
                (
                    ((0, 8), (16, 20), (24, 28)),
                    ((8, 12), (20, 24), (28, 32)),
                    ((12, 16), (20, 24), (28, 32)),
                ),
            ),
        ),
        ("rowwise", LINEAR, Cut(1, 12, (((0, 4),), ((4, 8),), ((8, 12),)))),
        ("rowwise:heads", LINEAR, Cut(1, 12, (((0, 6),), ((6, 9),), ((9, 12),)))),
        ("rowwise_split_input", LINEAR, Cut(1, 12, (((0, 4),), ((4, 8),), ((8, 12),)))),
        ("colwise_gather_output", LINEAR, Cut(0, 32, (((0, 10),), ((10, 21),), ((21, 32),)))),
        ("vocabulary", LINEAR, Cut(0, 32, (((0, 10),), ((10, 21),), ((21, 32),)))),
        ("vocabulary", EMBED, Cut(0, 10, (((0, 3),), ((3, 6),), ((6, 10),)))),
        ("vocabulary:sequence", EMBED, Cut(0, 10, (((0, 3),), ((3, 6),), ((6, 10),)))),
        ("replicated", LINEAR, None),
        ("sequence", LINEAR, None),
        ("gather", LINEAR, None),
    ],
)
def test_weights_are_cut_as_the_style_says(style: str, shape: ModuleShape, cut: Cut | None):
    """On 3 ranks, for 4 query and 2 key heads: query heads 0 1 | 2 | 3, key heads 0 | 1 | 1."""
    assert cuts(Style.parse(style), shape, HEADS, 3) == cut


@pytest.mark.parametrize(
    "style", ["colwise", "colwise:qkv", "colwise:2", "rowwise", "rowwise:heads"]
)
def test_transposed_weights_are_cut_along_the_other_dim(style: str):
    """A Conv1D holds [in, out]: the ranges are those of an nn.Linear, of the other dim."""
    plain, other = (cuts(Style.parse(style), shape, HEADS, 3) for shape in (LINEAR, CONV1D))
    assert plain is not None and other == plain.on(1 - plain.dim)


def test_biases_are_cut_as_the_outputs_are():
    """Those of a colwise, on dim 0; that of a rowwise is whole, and so is none at all."""
    for shape in (LINEAR, CONV1D):
        weight = cuts(Style("colwise", "qkv"), shape, HEADS, 2)
        assert weight is not None
        assert bias_cut(Style("colwise", "qkv"), shape, HEADS, 2) == weight.on(0)
        assert bias_cut(Style("rowwise"), shape, HEADS, 2) is None
    assert bias_cut(Style("colwise"), EMBED, HEADS, 2) is None


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.data())
def test_no_head_is_lost_or_torn(
    groups: int, keys: int, width: int, ranks: int, data: st.DataObject
):
    """Every feature of every head is on some rank, heads are whole, and queries keep their keys."""
    heads = groups * keys
    ranks = min(ranks, heads)
    table = Table.of({"a": "whole"}, heads, keys)
    sizes = {"heads": heads * width, "kv_heads": keys * width}
    by = data.draw(st.sampled_from(sorted(sizes)))
    cut = cuts(Style("colwise", by), ModuleShape("linear", 4, sizes[by]), table, ranks)
    assert cut is not None
    held = {i for own in cut.ranges for start, stop in own for i in range(start, stop)}
    assert held == set(range(sizes[by]))
    assert all(edge % width == 0 for own in cut.ranges for piece in own for edge in piece)
    queries, kept = (part.ranges for part in table.head_cuts(ranks))
    for mine, own in zip(queries, kept, strict=True):
        read = {i // groups for start, stop in mine for i in range(start, stop)}
        assert read == {i for start, stop in own for i in range(start, stop)}


@pytest.mark.parametrize(
    ("rank", "attn"),
    [
        (0, {"h": 2, "k": 1, "g": 2, "q": 32}),
        (1, {"h": 1, "k": 1, "g": 1, "q": 16}),
        (2, {"h": 1, "k": 1, "g": 1, "q": 16}),
    ],
)
def test_what_counts_heads_becomes_the_ranks_own(rank: int, attn: dict[str, int]):
    """`sets` names attributes and what they count; a cut Conv1D's width is found without it."""
    modules = {
        "attn": ModuleShape("other", numbers=(("h", 4), ("k", 2), ("g", 2), ("q", 64), ("x", 9))),
        "attn.qkv": CONV1D,
        "attn.out": CONV1D,
    }
    table = Table.of(
        {"attn.qkv": "colwise:qkv", "attn.out": "rowwise:heads"},
        heads=4,
        kv_heads=2,
        sets={"attn": {"h": "heads", "k": "kv_heads", "g": "groups", "q": "queries"}},
    )
    found = numbers(table, assign(table, list(modules), sp=False), modules, rank, 3)
    assert found == {"attn": attn, "attn.qkv": {"nf": 16 if rank == 0 else 12}}
