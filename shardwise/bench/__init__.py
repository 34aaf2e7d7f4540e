"""This file is the front of `bench/`: the peers and Shardwise, side by side in one run.

contender.py    what a contender is
torch_peers.py deepspeed_peers.py fairscale_peers.py ours.py    the contenders
roster.py       all of them, in the order of the table
measure.py      one rank's part of a run: build, warm up, meter, then rounds against the clock
wire.py live.py what is read: bytes of an interface, bytes of live tensors
table.py        rows from what the ranks measured, as text and as JSON
data.py         the suite `data`; link.py between two hosts; cuda.py on one GPU
"""
