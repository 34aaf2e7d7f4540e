"""The data of a run: sources of text, tokens, and batches."""
