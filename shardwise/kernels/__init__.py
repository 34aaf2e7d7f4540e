"""Kernels: faster implementations of single layers for some devices; optional."""
