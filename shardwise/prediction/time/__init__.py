"""The time of a step: kernels, collectives, and what of them overlaps."""
