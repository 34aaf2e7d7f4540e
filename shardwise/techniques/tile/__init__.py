"""Memory-centric tiling: a linear layer whose weights are gathered tile by tile."""
