"""This file is the front of `bench/`: the peers and Shardwise, side by side in one run.

contender.py    what a contender is
torch_peers.py torch_tensor.py deepspeed_peers.py fairscale_peers.py ours.py    the contenders
roster.py       all of them, and the suites `data` and `tensor`, in the order of their tables
least.py        the least that a rank has to send, by what a contender does
measure.py      one rank's part of a run: build, warm up, meter, then rounds against the clock
wire.py live.py what is read: bytes of an interface, bytes of live tensors
table.py        rows from what the ranks measured, as text and as JSON
suite.py        a suite at its sizes; link.py between two hosts; cuda.py `data` on one GPU
"""
