"""The values of the design: meshes, layouts, moves, states, plans, schedules. No torch.

`I`, `P`, `R` and `S` are the placements of a tensor on one axis of a mesh. `move` of
`shardwise.comm.move` takes a tensor from one to another.
"""

from shardwise.core.layouts.layout import I, P, R, S

__all__ = ["I", "P", "R", "S"]
