"""A benchmark's rank as a program: `python -m benchmarks.worker TASK RESULT`.

For ranks started without `spawn`: in a network namespace, or by torchrun. It reads a task as JSON,
and writes this rank's measurements to RESULT with the rank's number appended.
"""

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.contenders.contender import Task
from benchmarks.measure import measure
from shardwise.models.gpt import GPTConfig


def main() -> None:
    """One rank, from torchrun's variables. Both files are named on the command line."""
    task_file, result_file = sys.argv[1:]
    fields = json.loads(Path(task_file).read_text())
    fields["config"] = GPTConfig(**fields["config"])
    fields["contenders"] = tuple(fields["contenders"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    try:
        records = measure(Task(**fields))
        text = json.dumps([asdict(record) for record in records])
        Path(f"{result_file}.{dist.get_rank()}").write_text(text)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
