"""The oracles: training in one process, in plain PyTorch, and the closed forms of the papers."""
