"""The state of an engine in a checkpoint, as boxes of full named tensors."""
