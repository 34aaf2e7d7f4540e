"""Whether a table fits a model: all that can be wrong, each with its module and a remedy."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.styles import ModuleShape
from shardwise.core.tensor_plan import Table
from shardwise.core.tensor_plan_check import check

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
        (table({"blocks.*.mlp": "rowwise"}), "blocks.0.mlp (and 2 more", '.mlp.up": "rowwise"'),
        (table({"norm": "vocabulary"}), "norm, of type LayerNorm", '"norm": "whole"'),
        (table({"embed": "colwise"}), 'embed, of type embedding, as "colwise"', '"embed": "whole"'),
        (
            table({"blocks.*.attn": "replicated"}),
            "of all that is in it",
            'no entry for "blocks.*.attn"',
        ),
        (
            table({"blocks.*.attn": "whole"}),
            'as "whole", and q in it is "colwise:heads"',
            '"blocks.0.attn.q": "whole"',
        ),
        # heads
        (table(heads=None, kv_heads=None), "without a number of heads", "heads=8, kv_heads=2"),
        (table(kv_heads=3), "heads=8, kv_heads=3", "kv_heads=2"),
        (table(heads=2, kv_heads=1), "tp4 for a model of 2 query heads", "tp2"),
        # sizes
        (table({"blocks.*.mlp.up": "colwise:5"}), "192 output features", '.mlp.up": "colwise"'),
        # blocks
        (table(without="blocks.*.mlp.down"), "mlp.up (and 2 more", '"colwise_gather_output"'),
        (
            table(without="blocks.*.attn.o"),
            "attn.q (and 2 more",
            '.attn.o": "rowwise:heads" beside it',
        ),
        (table(without="blocks.*.mlp.up"), "whose input nothing cuts", '"rowwise_split_input"'),
        (table({"blocks.*.mlp.up": "colwise"}), "96 features cut otherwise", '.up": "colwise:2"'),
        (table({"blocks.*.mlp.up": "colwise:3"}), "cut otherwise than up", '.up": "colwise:2"'),
        (table({"blocks.*.attn.o": "rowwise_split_input"}), "attn.q", '"colwise_gather_output"'),
        (table(without="blocks.*.attn.q"), "attn.o (and 2", '.attn.o": "rowwise"'),
        (table({"blocks.*.attn.[kv]": "whole"}), "", ""),
        (table({"blocks.*.attn.v": "whole"}, "blocks.*.attn.[kv]"), "attn.k (and 2", "kv_heads"),
        (
            table({"blocks.*.attn.k": "colwise:kv_heads"}, "blocks.*.attn.[kv]"),
            "attn.v",
            "kv_heads",
        ),
        (table(without="blocks.*.attn.q_norm"), "(8) as one head of what", '"replicated"'),
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


NO_SHARDS = {"*norm": "sequence", "*attn": "gather"}


@pytest.mark.parametrize(
    ("changed", "given", "instead"),
    [
        (
            table(sequence={}),
            "no entries for the sequence",
            "{'blocks.*.attn': 'gather', 'blocks.*.norm': 'sequence', 'norm': 'sequence', ",
        ),
        (table(sequence=NO_SHARDS), "nothing makes shards", '{"blocks.0": "split"}'),
        (table(sequence=NO_SHARDS | {"blocks.0": "split"}), "", ""),
        (table(sequence=SEQUENCE | {"norm": "whole"}), "", ""),
        (table(sequence=SEQUENCE | {"blocks.*.mlp": "dropout"}), "", ""),
        (
            table(sequence={"embed": "vocabulary:sequence", "norm": "sequence"}),
            "blocks.0.norm",
            "norm",
        ),
        (table(sequence=SEQUENCE | {"*norm": "dropout", "*.norm": "sequence"}), "", ""),
        (table({"head": "whole"}, "embed", sequence=NO_SHARDS | {"blocks.0": "split"}), "", ""),
        (table(sequence=SEQUENCE | {"embed": "split"}), "of type embedding", '"embed": "whole"'),
        (table(sequence=SEQUENCE | {"blocks.*.mlp": "gather"}), "", ""),
        (table(sequence=SEQUENCE | {"blocks": "gather"}), "", ""),
        (
            table(sequence=SEQUENCE | {"head": "gather"}),
            'head, of type linear, as "gather"',
            "colwise",
        ),
        (table(sequence=SEQUENCE | {"head": "vocabulary:sequence"}), "type linear", '"vocabulary"'),
        (table(sequence=SEQUENCE | {"embed": "vocabulary:whole"}), "of type emb", '"vocabulary"'),
        (
            table(sequence={"norm": "sequence:join", "head": "vocabulary:whole"} | SEQUENCE),
            "",
            "",
        ),
    ],
)
def test_under_sp_all_that_works_on_shards_says_so(changed: Table, given: str, instead: str):
    """Something makes shards of the sequence, and no parameter used on them is without an entry."""
    problems = check(changed, MODEL, sp=True, ranks=4)
    assert len(problems) == (1 if given else 0), [str(problem) for problem in problems]
    for problem in problems:
        assert given in problem.given
        assert instead in problem.instead


def test_a_parameter_that_a_block_uses_itself_is_to_be_in_a_module_of_its_own():
    """No entry for the block can say it: neither message sends the user to the other."""
    scaled = replace(BLOCK, parameters=True, own=("gamma",))
    model = MODEL | {f"blocks.{i}": scaled for i in range(2)}
    own = 'self.gamma = LayerScale(...), a module whose forward uses the parameter, and "{}"'
    instead = own.format('blocks.*.gamma": "sequence')
    (problem,) = check(table(), model, sp=True, ranks=2)
    assert problem.given.startswith("blocks.0.gamma (and 1 more like it), a parameter that a Block")
    assert problem.instead == instead
    named = {"blocks.0": "sequence"} | SEQUENCE
    (problem,) = check(table(sequence=named), model, sp=True, ranks=2)
    assert problem.instead == instead
    (problem,) = check(table(sequence=named), MODEL, sp=True, ranks=2)
    assert problem.instead == 'no entry for "blocks.0"'
    apart = {f"blocks.{i}.gamma": ModuleShape("other", 64) for i in range(2)}
    entries = {"blocks.*.gamma": "sequence"} | SEQUENCE
    assert check(table(sequence=entries), MODEL | apart, sp=True, ranks=2) == []


def test_a_head_that_is_forgotten_under_sp_is_told():
    """The layer that makes the logits may work on shards, cut the vocabulary, or be whole."""
    untied = MODEL | {"head": ModuleShape("linear", 64, 100)}
    (problem,) = check(table(without="head"), untied, sp=True, ranks=2)
    assert problem.given.startswith("head, without an entry under sp")
    assert '"vocabulary" among the styles if it makes the logits' in problem.instead
    assert '{"head": "sequence:join"}' in problem.instead


@pytest.mark.parametrize("type_name", ["Conv1d", "BatchNorm1d", "GroupNorm", "LSTM", "GRU"])
def test_what_uses_several_positions_is_never_advised_as_sequence(type_name: str):
    """A convolution over positions would be wrong on shards: it is joined before, split after."""
    modules = MODEL | {"blocks.0.mix": ModuleShape("other", 64, type_name=type_name)}
    (problem,) = check(table(), modules, sp=True, ranks=2)
    assert problem.given.startswith(f"blocks.0.mix, a {type_name}, which uses several positions")
    assert problem.instead.endswith('sequence={"blocks.*.mix": "whole"}')
    assert '"sequence"' not in problem.instead


def test_what_is_not_known_is_advised_with_its_condition():
    """A module of the user's own may work by position or not: both entries are named."""
    modules = MODEL | {"blocks.0.mix": ModuleShape("other", 64, type_name="Mixer")}
    (problem,) = check(table(), modules, sp=True, ranks=2)
    assert '"sequence"} if it computes each position by itself; otherwise' in problem.instead


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
        ("colwise:kv_heads", ModuleShape("linear", 64, 5), "with kv_heads=2", "kv_heads="),
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


def test_results_may_stay_cut_between_modules_of_a_layer():
    """As those of BERT, query in one, output.dense in another: the block is what has both."""
    names = [
        *("attention.self.query", "attention.output.dense"),
        *("intermediate.dense", "output.dense"),
    ]
    sizes = [(64, 64), (64, 64), (64, 96), (96, 64)]
    modules = {
        f"layer.{i}.{name}": ModuleShape("linear", *size)
        for i in range(2)
        for name, size in zip(names, sizes, strict=True)
    }
    styles = {
        "*.query": "colwise:heads",
        "*.attention.output.dense": "rowwise:heads",
        "*.intermediate.dense": "colwise",
        "*.output.dense": "rowwise",
    }
    assert check(Table.of(styles, 4), modules, sp=False, ranks=3) == []
    del styles["*.attention.output.dense"], styles["*.output.dense"]
    problems = check(Table.of(styles, 4), modules, sp=False, ranks=3)
    assert [problem.given.partition(" ")[0] for problem in problems] == [
        "layer.0.attention.self.query",
        "layer.0.intermediate.dense",
    ]


def test_results_do_not_stay_cut_between_layers():
    """A rowwise in the next layer is no end for a colwise in this one."""
    modules = {f"layers.{i}.fc": ModuleShape("linear", 64, 64) for i in range(2)}
    table = Table.of({"layers.0.fc": "colwise", "layers.1.fc": "rowwise"})
    problems = check(table, modules, sp=False, ranks=2)
    assert [p.given.partition(",")[0] for p in problems] == ["layers.0.fc", "layers.1.fc"]
    assert '"layers.*.fc": "colwise_gather_output"' in problems[0].instead


def test_a_norm_as_long_as_what_is_cut_is_told():
    """It would be whole and given a part; one as long as the block's input may be before it."""
    modules = {
        "up": ModuleShape("linear", 64, 96),
        "mid": ModuleShape("other", 96),
        "pre": ModuleShape("other", 64),
        "down": ModuleShape("linear", 96, 64),
    }
    table = Table.of({"up": "colwise", "down": "rowwise"})
    (problem,) = check(table, modules, sp=False, ranks=2)
    assert problem.given == "mid, without an entry, and as long (96) as what up cuts"
    assert problem.instead == '"up": "colwise_gather_output"; or "mid": "whole"'


@pytest.mark.parametrize("sp", [False, True])
def test_styles_that_were_exchanged_are_told_as_that(sp: bool):
    """By the norm beside them; layers that are only defined in another order are no mistake."""
    linear = {"up": ModuleShape("linear", 64, 96), "down": ModuleShape("linear", 96, 64)}
    first = {"embed": MODEL["embed"], "blocks.0.norm": NORM}
    wrong = {"embed": "vocabulary", "blocks.*.up": "rowwise", "blocks.*.down": "colwise"}
    right = wrong | {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    sequence = {"embed": "vocabulary:sequence", "*norm": "sequence"}

    def told(styles: dict[str, str], order: list[str]) -> list[str]:
        modules = first | {f"blocks.0.{name}": linear[name] for name in order}
        found = check(Table.of(styles, sequence=sequence), modules, sp, 2)
        return [str(problem) for problem in found]

    (said,) = told(wrong, ["up", "down"])
    assert said.startswith('Given: blocks.0.up, as "rowwise", and down after it as "colwise": they')
    assert "exchanged, since norm is as wide (64) as what up takes and down gives" in said
    assert said.endswith('instead: "blocks.*.up": "colwise", "blocks.*.down": "rowwise".')
    assert told(right, ["up", "down"]) == told(right, ["down", "up"]) == []


def test_an_entry_for_a_module_is_for_all_that_is_in_it():
    """Experts that are whole work on shards together, and gradients of all of them are summed."""
    experts = {f"blocks.0.moe{name}": LAYER[".mlp" + name] for name in ("", ".up", ".down")}
    (problem, *_) = check(table(), MODEL | experts, sp=True, ranks=2)
    assert problem.given.startswith("blocks.0.moe.up, without an entry under sp")
    for style in ("sequence", "whole"):
        entries = SEQUENCE | {"blocks.*.moe": style}
        assert check(table(sequence=entries), MODEL | experts, sp=True, ranks=2) == []
