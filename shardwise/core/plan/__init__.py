"""The plan: its words, its parser, and the check that it can run."""
