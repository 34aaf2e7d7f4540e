"""What a technique costs a rank: the bytes that it sends in a step, and those that it stores.

The folder of a technique has a file that makes its `Price`; priced_techniques.py lists all.
The rows of the states table, which every plan has, are priced in traffic.py and stored_bytes.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.core.model_spec import ModelShape, ModelSpec, Operation
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Tier
from shardwise.prediction.stored_bytes import OptimizerShape
from shardwise.prediction.traffic import Counted, TrafficLine
from shardwise.techniques.expert.expert_moves import Loads

#: The loads of the experts in each microbatch; without them experts have an even load.
ExpertLoads = Sequence[Loads]


@dataclass(frozen=True)
class Share:
    """What one rank carries out of a plan: `model` is its part of `spec`, the full model.

    `trains`: it is a training step, and not an evaluation, which only goes forward.
    """

    plan: Plan
    spec: ModelSpec
    model: ModelShape
    rank: int
    optimizer: OptimizerShape
    loads: ExpertLoads = ()
    trains: bool = True


@dataclass(frozen=True)
class Price:
    """The costs of a technique for a rank; a plan without the technique costs nothing.

    sends    bytes in a step, or in an evaluation, of which the backward pass does not count
    stores   bytes on a tier between steps, by category
    bounds   the least and the most bytes, by axis and kind, of what depends on values
    omits    lines that the step of this number does not send; the flag says whether it follows one
             of this engine whose update may not be finished
    spends   the operations of one pass of the model beside those of the plain one
    """

    sends: Callable[[Share], Counted]
    stores: Callable[[Share, Tier], Mapping[str, int]] = lambda _share, _tier: {}
    bounds: Callable[[Share], Mapping[str, tuple[int, int]]] = lambda _: {}
    omits: Callable[[Plan, int, bool], Collection[TrafficLine]] = lambda _plan, _step, _follows: ()
    spends: Callable[[Share], Iterable[Operation]] = lambda _: ()
