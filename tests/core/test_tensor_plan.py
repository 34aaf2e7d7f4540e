"""Tables of tensor parallelism: what they say, which modules they match, how those are cut.

And whether a table fits a model: what is found before anything runs, with module and remedy.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.layouts.tensor_table import (
    STYLES,
    ModuleShape,
    Style,
    Table,
    assign,
    cuts,
    numbers,
)
from shardwise.techniques.tensor.table_check import check

WORDS = [*(style for style in STYLES if style != "colwise:N"), "colwise:2", "colwise:12"]
NAMES = [
    "embed",
    "blocks",
    *(f"blocks.{i}{n}" for i in (0, 1) for n in ("", ".up", ".down")),
    "head",
]


@pytest.mark.parametrize("text", WORDS)
def test_styles_print_as_they_are_written(text: str):
    """`str` and `parse` are inverse."""
    assert str(Style.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("colwize", "colwise"),
        ("rowwise:head", "rowwise:heads"),
        ("colwise:1", "colwise"),
        ("sequence_parallel", "sequence"),
        (None, ""),
    ],
)
def test_an_unknown_style_gets_the_nearest(text: Any, near: str):
    """The answer has all styles and the one that looks most like what was written."""
    with pytest.raises(InputError, match="Write instead:") as error:
        Style.parse(text)
    assert all(style in str(error.value) for style in STYLES)
    assert not near or str(error.value).endswith(f'Write instead: "{near}".')


def full() -> Table:
    return Table.of(
        {"embed": "vocabulary", "blocks.*.up": "colwise:heads", "blocks.*.down": "rowwise:heads"},
        heads=4,
        kv_heads=2,
        sequence={"embed": "vocabulary:sequence"},
        sets={"blocks.*": {"num_heads": "heads", "n": "groups"}},
    )


def test_tables_are_values():
    """Of the same words they are equal and print as what makes them; under a name they move."""
    assert len({full(), full(), Table.of({})}) == 2
    assert eval(str(full())) == full()  # noqa: S307
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


def test_which_pattern_of_a_module_counts():
    """The first, "whole" exempts; ? may match nothing; entries of the sequence precede under sp."""
    table = Table.of({"blocks.0.up": "whole", "*up": "colwise", "blocks.*": "rowwise"})
    found = {name: str(style) for name, style in assign(table, NAMES, sp=False).items()}
    assert found == {
        "blocks.0": "rowwise",
        "blocks.0.down": "rowwise",
        "blocks.1": "rowwise",
        "blocks.1.up": "colwise",
        "blocks.1.down": "rowwise",
    }
    table = Table.of({"blocks.*.up?": "colwise", "blocks.*.gate?": "colwise"})
    assert list(assign(table, NAMES, sp=False)) == ["blocks.0.up", "blocks.1.up"]
    assert str(assign(full(), NAMES, sp=True)["embed"]) == "vocabulary:sequence"
    assert str(assign(full(), NAMES, sp=False)["embed"]) == "vocabulary"


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (Table.of({"*": "whole", "blocks.*.upp": "colwise"}), ['"blocks.*.up"']),
        (Table.of({"*": "whole", "blocks.0.dwn": "colwise"}), ['"blocks.*.down"']),
        (Table.of({"*": "whole", "embd": "whole"}), ['"embed"', "embd?"]),
        (Table.of({"blocks.*.dwn?": "colwise"}), ['"blocks.*.down"']),
        (Table.of({"*": "whole", "hed": "whole", "ebd": "whole"}), ["2 things", '"head"']),
        (
            Table.of({"*": "whole"}, 4, sets={"bloks.*": {"n": "heads"}}),
            ['"bloks.*" in', '"blocks'],
        ),
    ],
)
def test_a_pattern_that_matches_nothing_gets_the_nearest(table: Table, told: list[str]):
    """Every such pattern is named, with a name that the model has, all in one answer."""
    with pytest.raises(InputError) as error:
        assign(table, NAMES, sp=False)
    assert [text for text in told if text not in str(error.value)] == []


CONV1D = ModuleShape("linear", 12, 32, bias=True, transposed=True, numbers=(("nf", 32), ("nx", 12)))


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
    [(0, {"h": 2, "k": 1, "g": 2, "q": 32}), (2, {"h": 1, "k": 1, "g": 1, "q": 16})],
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


NORM = ModuleShape("other", 64, type_name="LayerNorm")
BLOCK = ModuleShape("other", parameters=False, type_name="Block", numbers=(("num_heads", 8),))
LAYER: dict[str, ModuleShape] = {
    "": BLOCK,
    ".norm": NORM,
    ".attn": BLOCK,
    ".attn.q": ModuleShape("linear", 64, 64, bias=True),
    ".attn.k": ModuleShape("linear", 64, 32, bias=True),
    ".attn.v": ModuleShape("linear", 64, 32, bias=True),
    ".attn.q_norm": ModuleShape("other", 8),
    ".attn.o": ModuleShape("linear", 64, 64, bias=True),
    ".mlp": BLOCK,
    ".mlp.up": ModuleShape("linear", 64, 192),
    ".mlp.down": ModuleShape("linear", 96, 64),
}
MODEL: dict[str, ModuleShape] = {
    "embed": ModuleShape("embedding", 100, 64),
    "blocks": ModuleShape("other", parameters=False, type_name="ModuleList"),
    **{f"blocks.{i}{name}": shape for i in range(3) for name, shape in LAYER.items()},
    "norm": NORM,
    "head": ModuleShape("linear", 64, 100, tied="embed"),
}
FITTING = {
    "embed": "vocabulary",
    "blocks.*.attn.q": "colwise:heads",
    "blocks.*.attn.[kv]": "colwise:kv_heads",
    "blocks.*.attn.q_norm": "replicated",
    "blocks.*.attn.o": "rowwise:heads",
    "blocks.*.mlp.up": "colwise:2",
    "blocks.*.mlp.down": "rowwise",
    "head": "vocabulary",
}
SEQUENCE = {"embed": "vocabulary:sequence", "*norm": "sequence", "blocks.*.attn": "gather"}
MORE: dict[str, Any] = {
    "heads": 8,
    "kv_heads": 4,
    "sequence": SEQUENCE,
    "sets": {"blocks.*.attn": {"num_heads": "heads"}},
}


def table(changes: dict[str, str] | None = None, without: str = "", **more: Any) -> Table:
    styles = {key: style for key, style in FITTING.items() if key != without}
    return Table.of((changes or {}) | styles | (changes or {}), **(MORE | more))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_a_table_that_fits_has_no_problem(sp: bool, ranks: int):
    """Uneven cuts, ranks that share key heads, packed layers and a tied head are no problem."""
    assert check(table(), MODEL, sp, ranks) == []


UNFIT = [
    # kinds
    (table({"norm": "colwise"}), 'norm, of type LayerNorm, as "colwise"', '"norm": "whole"'),
    (table({"blocks.*.mlp": "rowwise"}), "blocks.0.mlp (and 2 more", '"rowwise" for one in it'),
    (table({"embed": "colwise"}), 'embed, of type embedding, as "colwise"', '"embed": "whole"'),
    (
        table({"blocks.*.attn": "replicated"}),
        'includes blocks.*.attn.q, "colwise:heads"',
        "an entry",
    ),
    # heads
    (table(heads=None, kv_heads=None), "in a table without heads=", "heads=8, kv_heads=2"),
    (table(kv_heads=3), "heads=8, kv_heads=3", "key heads"),
    (table(heads=2, kv_heads=1), "tp4 for a model of 2 query heads", "tp2"),
    # sizes and results
    (table({"blocks.*.mlp.up": "colwise:5"}), "192 output features", '.mlp.up": "colwise"'),
    (table({"blocks.*.mlp.up": "colwise"}), "96 input features are sharded", '"colwise:N" for N'),
    (table({"blocks.*.mlp.up": "colwise:3"}), "differently from the output of up", '"colwise:N"'),
    (table({"blocks.*.attn.o": "rowwise"}), "", ""),
    (table({"blocks.*.attn.[kv]": "whole"}), "", ""),
    # ties
    (table({"head": "whole"}), "head, which is", '"embed": "vocabulary", "head": "vocabulary"'),
    (table(without="embed"), 'embed, "whole"', '"embed": "vocabulary"'),
    (table({"head": "colwise_gather_output"}), "", ""),
    # sets
    (table(sets={"blocks.*.attn": {"num_head": "heads"}}), "num_head that", '{"num_heads": '),
    (table(sets={"blocks.*.attn": {"num_heads": "kv_heads"}}), "num_heads is 8", "heads=8"),
    (
        table(sets={"norm": {"num_heads": "heads"}}),
        "no attribute num_heads",
        '{"num_heads": "heads"}',
    ),
]
UNFIT_FOR_THE_SEQUENCE = [
    (table(sequence={}), "no entries for the sequence", '"embed": "vocabulary:sequence"'),
    (table(sequence=SEQUENCE | {"norm": "whole"}), "", ""),
    (table(sequence=SEQUENCE | {"embed": "split"}), "of type embedding", '"embed": "whole"'),
    (table(sequence=SEQUENCE | {"blocks": "gather"}), "", ""),
    (table(sequence=SEQUENCE | {"head": "vocabulary:sequence"}), "type linear", '"whole"'),
    (table(sequence={"norm": "sequence:join", "head": "vocabulary:whole"} | SEQUENCE), "", ""),
    (table(sequence={"blocks.0": "sequence"} | SEQUENCE), "includes blocks.*.norm", "each"),
]


@pytest.mark.parametrize(
    ("changed", "given", "instead", "sp"),
    [*((*row, False) for row in UNFIT), *((*row, True) for row in UNFIT_FOR_THE_SEQUENCE)],
)
def test_what_does_not_fit_is_told_with_its_module(
    changed: Table, given: str, instead: str, sp: bool
):
    """One problem, once for all layers, and a remedy; where the text is empty all is well."""
    problems = check(changed, MODEL, sp=sp, ranks=4)
    assert len(problems) == (1 if given else 0), [str(problem) for problem in problems]
    for problem in problems:
        assert given in problem.given
        assert instead in problem.instead
        assert "{name}" not in str(problem)


@pytest.mark.parametrize(
    ("style", "module", "given", "instead"),
    [
        ("vocabulary", ModuleShape("embedding", 3, 64), "3 rows, on 4 ranks", "tp3"),
        ("colwise_gather_output", ModuleShape("linear", 64, 2), "2 output features", "tp2"),
        ("rowwise_split_input", ModuleShape("linear", 1, 64), "1 input features", "tp1"),
        ("colwise:3", ModuleShape("linear", 64, 9), "9 output features, on 4", "tp3"),
        ("colwise:qkv", ModuleShape("linear", 64, 15), "heads=4, kv_heads=2", "kv_heads="),
        ("colwise:kv_heads", ModuleShape("linear", 64, 5), "kv_heads=2", "kv_heads="),
        ("rowwise:heads", ModuleShape("linear", 18, 64), "18 input features", "heads="),
    ],
)
def test_what_cannot_be_cut_over_the_ranks_is_told(
    style: str, module: ModuleShape, given: str, instead: str
):
    """A rank without a feature, and heads or parts that do not divide the features."""
    (problem,) = check(Table.of({"x": style}, 4, 2), {"x": module}, sp=False, ranks=4)
    assert problem.given.startswith("x, ")
    assert given in problem.given
    assert instead in problem.instead
