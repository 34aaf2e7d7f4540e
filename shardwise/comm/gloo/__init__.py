"""The gloo transport, and the shared memory between ranks of one host."""
