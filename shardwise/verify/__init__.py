"""Proves a plan: compares its run with one process, and with the predicted bytes and memory."""
