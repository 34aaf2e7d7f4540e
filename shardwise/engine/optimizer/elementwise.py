"""A check that refuses optimizers that need whole tensors when parameters are sharded.

A shard of a matrix has two dims too (flat_parameter.py).  An optimizer such as Muon would treat it
as a matrix and compute a wrong update, without any error.

    torch's and ours      known by name
    any other class       tried on small parameters (optimizer_probe.py)
"""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from shardwise.engine.optimizer.optimizer_groups import Options
from shardwise.engine.optimizer.optimizer_probe import OptimizerProbe, maker

#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)
#: Classes that need the full tensor, and are supported if each rank updates full parameters.
BY_TENSOR = ("Adafactor",)


def needs_whole_tensors(kind: type) -> bool:
    """Whether a class of torch.optim, or a class derived from it, is not elementwise."""
    return _torch_class(kind) not in ("", *ELEMENTWISE)


def updates_by_tensor(kind: type) -> bool:
    """Whether it is not elementwise, but supported if each rank updates full parameters."""
    return _torch_class(kind) in BY_TENSOR


def _torch_class(kind: type) -> str:
    """The name of the class in torch.optim that it is or derives from; "" for others."""
    bases = (c for c in kind.__mro__ if c.__module__.startswith("torch.optim"))
    return next((c.__name__ for c in bases if c is not Optimizer), "")


def is_known(kind: type) -> bool:
    """Whether it is a class of torch or of this package that updates each element alone."""
    ours = kind.__module__.startswith("shardwise.")
    return ours or (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE)


def works_on_pieces(kind: type[Optimizer], groups: Sequence[Options]) -> bool:
    """Whether it works on pieces of parameters.  Warns of one that cannot be tried."""
    if is_known(kind):
        return True
    if needs_whole_tensors(kind):
        return False
    probes = probes_of(kind, groups)
    if not all(probe.ran for probe in probes):
        warn_unprobed(kind)
    return all(probe.works_on_parts() for probe in probes if probe.ran)


def probes_of(kind: type[Optimizer], groups: Sequence[Options]) -> list[OptimizerProbe]:
    """A probe for each of the groups' options that differ in more than the rate."""
    distinct = {repr(sorted((k, v) for k, v in g.items() if k != "lr")): g for g in groups}
    return [OptimizerProbe(maker(kind, group)) for group in distinct.values()]


def warn_unprobed(kind: type[Optimizer]) -> None:
    warnings.warn(
        f"{kind.__name__} could not be tried on a small parameter. On shards it trains right only "
        "if its update of each element depends on that element's values alone.",
        stacklevel=4,
    )
