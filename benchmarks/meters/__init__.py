"""Meters of bytes: what is live, what communication holds, what leaves an interface."""
