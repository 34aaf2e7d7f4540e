"""The proof of a plan: its run beside one process, beside theory and beside what was counted."""
