"""Kernels: faster implementations of single layers for some devices; logits and their loss."""
