"""Small sabotages of the package, each of which a proof must refuse.

    data.py         rows, hybrid sharding, accumulation, precision, optimizer, buffers
    tensor.py       tensor and sequence parallelism, logits
    context.py      positions, rings, heads, the loss
    pipeline.py     schedules, stages, ties, weight versions
    experts.py      mixtures of experts
    run.py          overflows, rates, groups, idle ranks, dropout, chunks of a disk, evaluations
    accounts.py     bytes, memory, coverage, evaluation, outputs, checkpoints
    moments.py      memory within a step
    engine.py       what facts of the engine show, and a proof does not (tests/verify/facts.py)
    updates.py      updates that are made later, in parts or in 16 bits, scales, evaluations

A mutation is a patch of one function. A technique's mutations are added with the technique.
"""
