"""Checks that ranks agree: checksums, warnings of what may differ on purpose, comparisons."""
