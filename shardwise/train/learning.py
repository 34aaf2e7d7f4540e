r"""The learning rate of each step: a linear rise, then a decay.

        lr |   /‾‾\
           |  /    ‾\
           | /       ‾‾\__ final * lr
           +---+-----------+--- step
             warmup      steps

A function of the step alone, so that a resumed run continues the same curve.
"""

import math

from shardwise.train.config_sections import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """The rate of step `step`, counted from 0; the last one's is `final * lr`."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    if train.decay == "constant":
        return train.lr
    span = max(1, train.steps - 1 - train.warmup)
    done = min(1.0, (step - train.warmup) / span)
    left = 1 - done if train.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return train.lr * (train.final + (1 - train.final) * left)
