"""Small sabotages of the package, each of which a proof must refuse.

    data.py         rows, gradients and their sums, gathers, precision, updates
    run.py          what a run does over its steps: skipped ones, rates, delays, disks, evaluations
    parallel.py     tensor, sequence and context parallelism, pipelines, mixtures of experts
    accounts.py     bytes, memory, coverage, checkpoints, words of a plan, facts of the engine

A row says what is called, under which plan it shows and of which model (micro.py), what is changed,
and what of a proof refuses it. Most changes are of one function, by the makers of mutation.py.
"""
