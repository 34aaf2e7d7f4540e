"""The values everything else is built from: meshes, layouts, moves, states, plans. No torch."""
