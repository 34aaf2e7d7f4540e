"""Benchmarks: Shardwise and its peers, side by side in one run.

contenders/     the peers and ours: contender.py is their interface, roster.py the list of suites
measure.py      one rank's part of a run: build, meter, warm up, then timed rounds
meters.py       bytes that are live, that communication holds, that leave an interface
table.py        the results as text and JSON, beside the fewest bytes that a rank has to send
suite.py        running a suite at its sizes; cuda.py on one GPU
disk.py         the suite `disk`: what a step with states on a disk makes of its bandwidth
async_save.py   the suite `save`: what an asynchronous save adds to a step
"""
