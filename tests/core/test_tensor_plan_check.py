"""Whether a table fits a model: what is found before anything runs, with module and remedy."""

from typing import Any

import pytest

from shardwise.techniques.tensor.styles import ModuleShape
from shardwise.techniques.tensor.table_check import check
from shardwise.techniques.tensor.tensor_table import Table

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
STYLES = {
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
    """The table that fits, with entries of its styles changed or left out."""
    styles = {key: style for key, style in STYLES.items() if key != without}
    return Table.of((changes or {}) | styles | (changes or {}), **(MORE | more))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_table_that_fits_has_no_problem(sp: bool, ranks: int):
    """Uneven cuts, ranks that share key heads, packed layers and a tied head are no problem."""
    assert check(table(), MODEL, sp, ranks) == []


@pytest.mark.parametrize(
    ("changed", "given", "instead"),
    [
        # kinds
        (table({"norm": "colwise"}), 'norm, of type LayerNorm, as "colwise"', '"norm": "whole"'),
        (table({"blocks.*.mlp": "rowwise"}), "blocks.0.mlp (and 2 more", '"rowwise" for one in it'),
        (table({"norm": "vocabulary"}), "norm, of type LayerNorm", '"norm": "whole"'),
        (table({"embed": "colwise"}), 'embed, of type embedding, as "colwise"', '"embed": "whole"'),
        (
            table({"blocks.*.attn": "replicated"}),
            'includes blocks.*.attn.q, "colwise:heads"',
            'an entry for each module in "blocks.*.attn"',
        ),
        # heads
        (table(heads=None, kv_heads=None), "in a table without heads=", "heads=8, kv_heads=2"),
        (table(kv_heads=3), "heads=8, kv_heads=3", "key and value heads"),
        (table(heads=2, kv_heads=1), "tp4 for a model of 2 query heads", "tp2"),
        # sizes
        (table({"blocks.*.mlp.up": "colwise:5"}), "192 output features", '.mlp.up": "colwise"'),
        # results
        (
            table({"blocks.*.mlp.up": "colwise"}),
            "96 input features are sharded",
            '"colwise:N" for N parts',
        ),
        (
            table({"blocks.*.mlp.up": "colwise:3"}),
            "differently from the output of up",
            '"colwise:N" for N parts',
        ),
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
    ],
)
def test_what_does_not_fit_is_told_with_its_module(changed: Table, given: str, instead: str):
    """One problem, once for all layers, and a remedy; where the text is empty all is well."""
    problems = check(changed, MODEL, sp=False, ranks=4)
    assert len(problems) == (1 if given else 0), [str(problem) for problem in problems]
    for problem in problems:
        assert given in problem.given
        assert instead in problem.instead
        assert "{name}" not in str(problem)


@pytest.mark.parametrize(
    ("changed", "given", "instead"),
    [
        (table(sequence={}), "no entries for the sequence", '"embed": "vocabulary:sequence"'),
        (table(sequence=SEQUENCE | {"norm": "whole"}), "", ""),
        (table(sequence=SEQUENCE | {"embed": "split"}), "of type embedding", '"embed": "whole"'),
        (table(sequence=SEQUENCE | {"blocks": "gather"}), "", ""),
        (table(sequence=SEQUENCE | {"head": "gather"}), 'type linear, as "gather"', '"whole"'),
        (table(sequence=SEQUENCE | {"head": "vocabulary:sequence"}), "type linear", '"whole"'),
        (table(sequence=SEQUENCE | {"embed": "vocabulary:whole"}), "of type emb", '"whole"'),
        (
            table(sequence={"norm": "sequence:join", "head": "vocabulary:whole"} | SEQUENCE),
            "",
            "",
        ),
        (table(sequence={"blocks.0": "sequence"} | SEQUENCE), "includes blocks.*.norm", "each"),
    ],
)
def test_entries_for_the_sequence(changed: Table, given: str, instead: str):
    """Under sp there are some, and each fits the kind of its module."""
    problems = check(changed, MODEL, sp=True, ranks=4)
    assert len(problems) == (1 if given else 0), [str(problem) for problem in problems]
    for problem in problems:
        assert given in problem.given
        assert instead in problem.instead


@pytest.mark.parametrize(
    ("style", "module", "given", "instead"),
    [
        ("vocabulary", ModuleShape("embedding", 3, 64), "3 rows, on 4 ranks", "tp3"),
        ("vocabulary", ModuleShape("linear", 64, 3), "3 output features, on 4", "tp3"),
        ("colwise_gather_output", ModuleShape("linear", 64, 2), "2 output features", "tp2"),
        ("rowwise_split_input", ModuleShape("linear", 1, 64), "1 input features", "tp1"),
        ("colwise:3", ModuleShape("linear", 64, 9), "9 output features, on 4", "tp3"),
        (
            "colwise:2",
            ModuleShape("linear", 64, 9),
            '9 output features, as "colwise:2"',
            '"colwise"',
        ),
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


@pytest.mark.parametrize("heads", [3, 5])
def test_heads_that_do_not_divide_the_features_are_told_of_every_layer(heads: int):
    """The four kinds of layers that are cut by heads, each once."""
    problems = check(table(heads=heads, kv_heads=None), MODEL, sp=False, ranks=2)
    assert [problem.given.partition(" ")[0] for problem in problems] == [
        f"blocks.0.attn.{name}" for name in ("q", "k", "v", "o")
    ]
