"""Sabotages of what a step holds between its beginning and its end, which is gone afterwards."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.techniques.data.flat.flat_gradient import FlatGradient
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.recompute.host_activations import HostActivations, HostedBlock, Stored
from shardwise.techniques.recompute.partitioned import Inputs
from tests.verify.mutations.mutation import Mutation, Patch, around


def a_second_copy_while_gathered(patch: Patch) -> None:
    def gather(real: Any, flat: Flat) -> None:
        real(flat)
        if flat.reshards:
            flat.__dict__["second"] = flat.full.clone()

    def free(real: Any, flat: Flat) -> None:
        real(flat)
        flat.__dict__.pop("second", None)

    around(patch, Flat, "unshard", gather)
    around(patch, Flat, "reshard", free)


def a_second_copy_in_backward(patch: Patch) -> None:
    """From the second gather of a step on, until the parameters are freed."""

    def gather(real: Any, flat: Flat) -> None:
        real(flat)
        flat.__dict__["gathers"] = flat.__dict__.get("gathers", 0) + 1
        if flat.reshards and flat.__dict__["gathers"] % 2 == 0:
            flat.__dict__["second"] = flat.full.clone()

    def free(real: Any, flat: Flat) -> None:
        real(flat)
        flat.__dict__.pop("second", None)

    around(patch, Flat, "unshard", gather)
    around(patch, Flat, "reshard", free)


def _until_the_end(patch: Patch) -> list[Any]:
    """What is put into the list stays alive until the step of any rank ends."""
    kept: list[Any] = []

    def settle(real: Any, engine: Engine, *args: Any) -> Any:
        found = real(engine, *args)
        kept.clear()
        return found

    around(patch, Engine, "_settle", settle)
    return kept


def inputs_kept_whole(patch: Patch) -> None:
    def keep(real: Any, inputs: Inputs, x: Tensor) -> Any:
        inputs.__dict__.setdefault("whole", []).append(x)
        return real(inputs, x)

    around(patch, Inputs, "_keep", keep)


def host_copies_not_dropped(patch: Patch) -> None:
    kept = _until_the_end(patch)

    def keep(real: Any, host: HostActivations, x: Tensor) -> Any:
        found = real(host, x)
        kept.append(getattr(found, "stored", None))
        return found

    around(patch, HostActivations, "keep", keep)


def device_copies_not_dropped(patch: Patch) -> None:
    kept = _until_the_end(patch)

    def fetched(real: Any, stored: Stored) -> Tensor:
        kept.append(real(stored))
        return kept[-1]

    around(patch, Stored, "bytes", fetched)


def all_blocks_fetched_at_once(patch: Patch) -> None:
    def begin_backward(real: Any, block: HostedBlock) -> None:
        earlier = block
        while not block.begun and earlier is not None:
            block.kept += [ref for ref in earlier.kept if ref not in block.kept]
            earlier = None if earlier.before is None else earlier.before()
        real(block)

    around(patch, HostedBlock, "begin_backward", begin_backward)


def all_units_gathered_ahead(patch: Patch) -> None:
    def init(
        real: Any, data: Data, root: Any, units: Any, pace: Any, *args: Any, **of: Any
    ) -> None:
        real(data, root, units, replace(pace, ahead=len(units.order)), *args, **of)

    around(patch, Data, "__init__", init)


def gradients_freed_at_the_end(patch: Patch) -> None:
    kept = _until_the_end(patch)

    def arrived(real: Any, grads: FlatGradient, out: Tensor, sent: Tensor) -> None:
        real(grads, out, sent)
        kept.append(sent)

    around(patch, FlatGradient, "_arrived", arrived)


MUTATIONS = (
    Mutation(
        "a second copy of what is gathered",
        *("dp2 zero3", "moments", a_second_copy_while_gathered, "gpt"),
    ),
    Mutation(
        "a second copy of what is gathered in backward",
        *("dp2 zero3", "moments", a_second_copy_in_backward, "gpt"),
    ),
    Mutation("inputs kept whole", "tp2 recompute:partitioned", "moments", inputs_kept_whole, "gpt"),
    Mutation(
        "copies on the host not dropped",
        *("dp2 activations:host", "moments", host_copies_not_dropped, "gpt"),
    ),
    Mutation(
        "copies on the device not dropped",
        *("dp2 activations:host", "moments", device_copies_not_dropped, "gpt"),
    ),
    Mutation(
        "all blocks fetched at once",
        *("dp2 activations:host", "moments", all_blocks_fetched_at_once, "deep"),
    ),
    Mutation(
        "all units gathered ahead",
        *("dp2 zero3 offload:param", "moments", all_units_gathered_ahead, "gpt"),
    ),
    Mutation(
        "sent gradients freed at the step's end",
        *("dp2 zero2", "moments", gradients_freed_at_the_end, "gpt"),
    ),
)
