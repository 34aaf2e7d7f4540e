"""What outlives a run: whole named tensors and numbers, in boxes."""
