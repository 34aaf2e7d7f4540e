"""Traces a model's forward pass: its values, and the stages that use them."""
