"""The command line: one file for each command, and errors of the command line in `usage.py`."""
