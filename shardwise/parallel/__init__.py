"""The techniques, a folder each; no folder imports another's."""
