"""Sabotages of rules that the run and the prediction share, and of loads and arenas."""

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.tiers.arena import _Slot
from shardwise.core.layouts import flatten
from shardwise.engine import memory
from shardwise.engine.state.state import Loading
from shardwise.techniques.layers import layer_plan
from shardwise.techniques.offload import price as offload_price
from shardwise.techniques.recompute import word as recompute_word
from tests.verify.mutations.mutation import Mutation, Patch, around, everywhere


def host_memory_in_no_list(patch: Patch) -> None:
    """The second gradients of delayed updates, in run and prediction."""
    real, real_bytes = memory.gradients_of, offload_price.host_bytes

    def gradients_of(flat: Any) -> list[Any]:
        return [t for t in real(flat) if t is not flat.grads.other_host_grad]

    def host_bytes(*args: Any, **kwargs: Any) -> dict[str, int]:
        found = real_bytes(*args, **kwargs)
        return found | {"gradients": found["gradients"] // 2}

    everywhere(patch, "gradients_of", real, gradients_of)
    everywhere(patch, "host_bytes", real_bytes, host_bytes)


def units_are_aligned_to_elements(patch: Patch) -> None:
    real = flatten.flatten
    everywhere(patch, "flatten", real, lambda numels, _, ranks: real(numels, 1, ranks))


def a_budget_is_doubled(patch: Patch) -> None:
    real = recompute_word.recompute_budget
    everywhere(patch, "recompute_budget", real, lambda what: 2 * real(what))


def a_slot_is_never_free_again(patch: Patch) -> None:
    def tensor(real: Any, slot: Any, *args: Any) -> Any:
        found = real(slot, *args)
        slot.user = StorageWeakRef(slot.memory.untyped_storage())
        return found

    around(patch, _Slot, "tensor", tensor)


def the_last_layer_of_a_range_left_out(patch: Patch) -> None:
    def expanded(real: Any, pattern: str) -> Any:
        return real(pattern.replace("0-2", "0-1"))

    around(patch, layer_plan, "_expanded", expanded)


def frozen_weights_are_not_loaded(patch: Patch) -> None:
    def init(real: Any, loading: Any, model: Any, sharded: Any, *args: Any) -> None:
        real(loading, model, sharded, *args)
        frozen = {f"model/{n}" for flat in sharded.flats if not flat.trained for n in flat.names}
        loading.boxes = [box for box in loading.boxes if box.name not in frozen]

    around(patch, Loading, "__init__", init)


MUTATIONS = (
    Mutation(
        "host memory in no list",
        "dp2 zero1 offload:optim-delayed=0",
        "memory",
        host_memory_in_no_list,
    ),
    Mutation(
        "units are aligned to elements",
        "dp2 zero3",
        "memory",
        units_are_aligned_to_elements,
        "gpt",
    ),
    Mutation("a budget is doubled", "dp2 recompute:24KiB", "memory", a_budget_is_doubled, "deep"),
    Mutation(
        "a slot is never free again",
        "recompute:full arenas",
        "memory",
        a_slot_is_never_free_again,
        "gpt",
    ),
    Mutation(
        "the last layer of a range left out",
        "dp2 zero1 | blocks.0-2: zero3",
        "memory",
        the_last_layer_of_a_range_left_out,
        "deep",
    ),
    Mutation("frozen weights are not loaded", "dp2 zero1", "parity", frozen_weights_are_not_loaded),
)
