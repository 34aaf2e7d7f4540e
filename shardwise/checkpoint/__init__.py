"""Checkpoints: full named tensors and numbers, saved in pieces."""
