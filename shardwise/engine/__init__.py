"""Composition: every technique applied to one model in one written order."""
