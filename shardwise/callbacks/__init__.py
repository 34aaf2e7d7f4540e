"""Callbacks: objects that are called as a run proceeds, trackers among them.

    Callback                    run_began, step_ended, evaluated, saved, run_ended
    Callbacks                   several of them, called in order
    TensorBoard WandB MLflow    trackers

`shardwise train` calls the callbacks of its configuration, as a loop of one's own can.
"""

from shardwise.callbacks.callback import Callback, Callbacks, RunFacts
from shardwise.callbacks.trackers import MLflow, TensorBoard, WandB

__all__ = ["Callback", "Callbacks", "MLflow", "RunFacts", "TensorBoard", "WandB"]
