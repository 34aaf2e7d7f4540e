"""Recomputation: activations of some modules are computed again in the backward pass."""
