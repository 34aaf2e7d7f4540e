"""Models: a GPT, small models of transformers, and the user's own models by file name."""
