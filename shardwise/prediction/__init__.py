"""Predictions of the bytes a plan sends and stores, by formulas: imports core, not torch."""
