"""Plans of single layers: their text, the plan of each layer, and what is refused."""

import pytest

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems

TEXT = "dp4 zero3 | embed,head: tp4 zero1 | blocks.0-2: tp2 dp2 recompute:full"


def test_text_round_trips():
    """A plan with plans of layers is what its canonical text says, and hashes as that."""
    plan = Plan.parse(TEXT)
    canonical = "dp4 zero3 | embed,head: tp4 zero1 | blocks.0-2: dp2 tp2 recompute:full"
    assert str(plan) == canonical
    assert Plan.parse(canonical) == plan
    assert hash(Plan.parse(canonical)) == hash(plan)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "dp4 zero3"), (1, "tp4 zero1"), (2, "dp2 tp2 zero3 recompute:full")],
)
def test_a_layer_inherits_what_it_does_not_say(number: int, expected: str):
    """Its own words replace those of the model; its axes replace all of the model's but pp."""
    assert str(Plan.parse(TEXT).of_layers(number)) == expected


def test_ranks_that_a_layer_does_not_name_are_data_ranks():
    """`pp2 dp4 | a: tp2` leaves two data ranks of each stage."""
    assert str(Plan.parse("pp2 dp4 | a: tp2").of_layers(1)) == "pp2 dp2 tp2"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("embed", 1),
        ("embed.weight", 1),
        ("head.bias", 1),
        ("blocks.0", 2),
        ("blocks.2.mlp.up.weight", 2),
        ("blocks.3", 0),
        ("norm.weight", 0),
        ("embedding", 0),
    ],
)
def test_the_plan_of_a_name(name: str, number: int):
    """A module or parameter belongs to the first plan that matches it or a module around it."""
    assert Plan.parse(TEXT).layer_of(name) == number


def test_axes_of_a_mesh_have_their_own_names():
    """The axes of the mesh of the second plan of layers are called dp.2 and tp.2."""
    plan = Plan.parse(TEXT)
    assert [plan.size_of(axis) for axis in ("dp", "tp.1", "dp.2", "tp.2")] == [4, 4, 2, 2]
    here = plan.coordinate(3)
    assert [here[axis] for axis in ("dp", "tp.1", "dp.2", "tp.2")] == [3, 3, 1, 1]


def test_a_plan_without_data_axis_takes_the_smallest_world_of_its_layers():
    """`zero3 | head: tp4` needs four ranks; it runs on multiples of them."""
    assert Plan.parse("zero3 | head: tp4").completed(None).size == 4
    assert not problems(Plan.parse("zero3 | head: tp4"), 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp4 | embed", "names of layers, a colon, a space and plan words"),
        ("dp4 | embed: pp2 zero3", "'pp2' in the plan of the layers embed"),
        ("dp4 | embed: bf16", "'bf16' in the plan of the layers embed"),
        ("dp4 | embed: zeroo3", "zero3 for 'zeroo3'"),
        ("dp4 | blocks.3-1: tp2", "blocks.1-2"),
    ],
)
def test_wrong_text(text: str, said: str):
    """The error names the part of the text and what a layer may say."""
    with pytest.raises(InputError) as error:
        Plan.parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp4 | embed: tp3", "axes whose product is 4"),
        ("dp4 | embed: dp2 tp4", "axes whose product is 4"),
        ("dp6 | a: tp2 | b: tp3", "tp2 and layers with tp3"),
        ("dp2 tp2 sp | a: tp4", "'sp'"),
        ("dp4 zero3 arenas | a: tp2", "'arenas'"),
        ("dp4 zero3 tile:4 | a: tp2", "'tile:4'"),
        ("dp4 | a: offload:optim@disk", "'offload:optim@disk'"),
        ("dp4 | a: recompute:1GiB", "'recompute:1GiB'"),
        ("dp2 pp2 pipedream:4 | a: tp2", "'pipedream:4'"),
        ("dp4 zero3 | a: zero1 offload:param", "in the plan of the layers a"),
    ],
)
def test_plans_that_cannot_work(text: str, said: str):
    """Each is refused before anything starts, with what is allowed."""
    found = problems(Plan.parse(text))
    assert len(found) == 1
    assert said in str(found[0])
