"""Tensor and sequence parallelism: linear layers, embeddings, logits, cross-entropy."""
