"""The values of the design: meshes, layouts, moves, states, plans, schedules. No torch."""
