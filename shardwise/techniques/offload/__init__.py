"""Offload: states that rest in host memory, and the thread that updates them there."""
