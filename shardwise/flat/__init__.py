"""Flat parameters and their gradients."""
