"""What changes no number of a training: optimizers on pieces, prefetching, buckets, one rank."""

import pytest
import torch

from tests.engine.cases import Case, Task, assert_same, oracle, train
from tests.pool import run_gloo, run_threads

TASK = Task()


OPTIMIZERS = {
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["dp2 zero1"])
def test_every_elementwise_optimizer_works_on_pieces(plan, optimizer):
    """Each class of torch.optim updates pieces (some of them empty) as it updates the whole."""
    kind, options = OPTIMIZERS[optimizer]
    case = Case(f"{plan} fp64", kind=kind, options=options)
    # Rprop and amsgrad look at signs and maxima: what is equal to 1e-12 stays equal
    assert_same(run_threads(2, train, TASK, case), oracle(TASK, case), 1e-8)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("plan", ["dp2 zero2", "dp2 zero3"])
def test_how_far_gathering_runs_ahead_changes_no_number(plan, prefetch):
    """Prefetching 0, 1 or 3 units gives the same training."""
    case = Case(f"{plan} fp64", prefetch=prefetch)
    assert_same(run_gloo(2, train, TASK, case), oracle(TASK, case), 1e-10)


@pytest.mark.parametrize("bucket", ["64B", "4KiB", "1MiB"])
def test_the_size_of_buckets_changes_no_number(bucket):
    """Units of one parameter each, a few, or all of them: the same training."""
    case = Case(f"dp2 fp64 bucket:{bucket}", units="auto")
    assert_same(run_gloo(2, train, TASK, case), oracle(TASK, case), 1e-10)
