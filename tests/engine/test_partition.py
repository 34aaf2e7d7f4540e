import re
import threading
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError
from shardwise.models import gpt
from shardwise.models.registry import find
from shardwise.techniques.pipeline.partition import balance_by_time, misplaced, starts
from tests.pool import run_threads


def small(layers: int = 6, tied: bool = False, vocabulary: int = 8) -> gpt.GPT:
    return gpt.GPT(gpt.GPTConfig(vocabulary, layers, 8, 2, 2, 8, 8, tied))


def test_stages_are_cut_between_blocks_of_equal_weight():
    """Six equal blocks in three stages, with small ends: two each."""
    assert starts(small(), 3) == ("blocks.2", "blocks.4")


def test_a_large_vocabulary_makes_the_ends_shorter():
    """Embedding and head weigh three blocks each, so the middle stage has most of the blocks."""
    model = small(vocabulary=200)  # 1600 weights, a block has 464
    assert starts(model, 3) == ("blocks.1", "blocks.5")


def test_a_tied_head_weighs_in_both_stages_that_hold_it():
    """Tied or not, the last stage holds the matrix."""
    assert starts(small(vocabulary=200, tied=True), 3) == starts(small(vocabulary=200), 3)


def test_one_stage_has_no_start():
    """A world of one needs no cut."""
    assert starts(small(), 1) == ()


def test_with_more_stages_than_blocks_any_layer_may_begin_one():
    """Two blocks in four stages: the embedding alone, and the head; the norm where it is light."""
    assert starts(small(layers=2, vocabulary=112), 4) == ("blocks.0", "blocks.1", "head")


def test_a_sequential_is_cut_between_its_layers():
    """Modules of one class in a list are what repeats."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert starts(model, 3) == ("2", "4")


def test_stages_by_hand_are_those_given():
    """Any module that is called may begin a stage."""
    assert starts(small(), 3, ["blocks.1", "head"]) == ("blocks.1", "head")


@pytest.mark.parametrize("counts", [(1, 3, 2), (4, 1, 1)])
def test_a_plan_counts_the_blocks_of_stages(counts: tuple[int, ...]):
    """Each rank holds the next so many, and no other."""
    plan, first = f"pp3 1f1b:3 stages:{','.join(map(str, counts))}", 0
    for rank, count in enumerate(counts):
        names = [box.name for box in sw.parallelize(small(), plan, traced(rank, 3)).boxes()]
        held = {int(found[1]) for name in names if (found := re.search(r"blocks\.(\d+)", name))}
        assert held == {*range(first, first + count)}
        assert any("embed" in name for name in names) == (rank == 0)
        assert any("head" in name for name in names) == (rank == 2)
        first += count


def test_fewer_layers_than_stages_are_refused():
    """The error says how many there are, and the degree to write."""
    text = r"6 stages for a GPT of 5 layers.*embed, blocks\.0, blocks\.1, norm, head.*pp5"
    with pytest.raises(InputError, match=text):
        starts(small(layers=2), 6)


@pytest.mark.parametrize(
    ("name", "first"),
    [("llama", "model.layers.1"), ("gpt2", "transformer.h.1"), ("bert", "bert.encoder.layer.1")],
)
def test_models_of_transformers_are_cut_between_their_layers(name: str, first: str):
    """By the plan of the configuration where there is one, else by the repeated class."""
    pytest.importorskip("transformers")
    assert starts(find(f"hf:{name}").build(), 2) == (first,)


def test_an_encoder_and_a_decoder_are_both_cut():
    """Their blocks are of two classes; each list of repeated blocks is a place to cut."""
    pytest.importorskip("transformers")
    first = "model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"
    assert starts(find("hf:bart").build(), 4) == first


def test_what_transformers_defines_out_of_order_is_known():
    """A norm after the blocks that it stands before, a head before the blocks it stands on."""
    pytest.importorskip("transformers")
    other = "model.encoder.embed_positions"
    assert misplaced(find("hf:bart").build())["model.encoder.layernorm_embedding"] == other
    assert misplaced(find("hf:camembert").build()) == {"lm_head": "roberta"}
    assert misplaced(small()) == misplaced(find("hf:llama").build()) == {}


def test_lists_of_lists_are_cut_between_what_is_called():
    """Blocks in lists in a list: their elements may begin stages, the lists themselves do not."""
    pairs = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    model = nn.Module()
    model.blocks = nn.ModuleList(pairs)
    assert starts(model, 4) == ("blocks.0.1", "blocks.1.0", "blocks.1.1")


def test_a_small_list_is_no_place_to_cut():
    """The layers of a head go with their neighbour, though there are two of them in a row."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
    model.head = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert starts(model, 2) == ("blocks.1",)


def test_a_plan_of_transformers_wins_over_the_repeated_class():
    """`base_model_pp_plan` says which list is gone through."""

    class Config:
        model_type = "other"
        base_model_pp_plan: ClassVar = {"embed": (), "blocks": (), "norm": ()}

    class Planned(nn.Module):
        base_model_prefix = "base"
        config = Config()

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Module()
            self.base.norm = nn.Linear(4, 4)
            self.base.embed = nn.Linear(4, 4)
            self.base.heavy = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
            self.base.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    assert starts(Planned(), 3) == ("base.blocks.1", "base.blocks.2")
    assert misplaced(Planned()) == {"base.norm": "base.blocks"}


class Clock:
    """A clock that only layers move."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return x + self.weight


def test_stages_by_time_balance_what_layers_take(monkeypatch: pytest.MonkeyPatch):
    """One slow layer of four is a stage of its own, though all have as many parameters."""
    clock = Clock()
    monkeypatch.setattr("shardwise.techniques.pipeline.partition.time", clock)
    model = nn.Sequential(*[Slow(clock, seconds) for seconds in (1, 1, 9, 1)])
    assert starts(model, 3) == ("1", "2")
    assert balance_by_time(model, lambda m: m(torch.zeros(1)), 3) == ("2", "3")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model)


class Clocks(Clock, threading.local):
    """One for each thread, that is each rank."""


def timed(world: World, clocks: Clocks) -> tuple[str, ...]:
    """The cut by a clock that goes differently on every rank."""
    seconds = [(1, 1, 9, 1), (9, 1, 1, 1)][world.rank]
    model = nn.Sequential(*[Slow(clocks, each) for each in seconds])
    return balance_by_time(model, lambda m: m(torch.zeros(1)), 3, world=world)


def test_the_first_ranks_times_decide_for_all(monkeypatch: pytest.MonkeyPatch):
    """Ranks that measure differently cut alike."""
    clocks = Clocks()
    monkeypatch.setattr("shardwise.techniques.pipeline.partition.time", clocks)
    assert run_threads(2, timed, clocks) == [("2", "3")] * 2


def test_a_model_without_memory_cannot_be_timed():
    """The error names what can be done instead."""
    with torch.device("meta"):
        model = small()
    with pytest.raises(InputError, match=r"on the meta device.*starts\(model, stages\)"):
        balance_by_time(model, lambda m: m(torch.zeros(1, 2).long()), 2)
