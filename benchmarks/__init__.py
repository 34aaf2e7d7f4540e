"""Benchmarks: Shardwise and its peers, side by side in one run.

contender.py    the interface of a contender
torch_peers.py torch_tensor.py torch_pipeline.py context_peers.py deepspeed_peers.py
fairscale_peers.py ours.py
                the contenders
roster.py       the list of all contenders, and the suites `data`, `tensor` and `pipeline`
least.py        the fewest bytes that a rank has to send
measure.py      one rank's part of a run: build, meter, warm up, then timed rounds
live_bytes.py   a meter of live tensor bytes
table.py        the results as text and JSON
suite.py        running a suite at its sizes; link.py between two hosts; cuda.py on one GPU
update.py       the suite `update`: the optimizer's step in host memory alone
largest.py      the suite `offload` on one GPU: the largest models; fit.py what fits, by prediction
disk.py         the suite `disk`: what a step with states on a disk makes of its bandwidth
"""
