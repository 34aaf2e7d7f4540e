"""docs/how-to/trainer.md: its script is the example, and its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/trainer.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^torchrun (--nproc_per_node 2) (examples/trainer.py)(.*)$", re.MULTILINE)


def test_the_page_shows_the_example() -> None:
    """The script of docs/how-to/trainer.md is examples/trainer.py, letter by letter."""
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown == (ROOT / "examples/trainer.py").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_commands_of_the_page_train(tmp_path: Path) -> None:
    """Two ranks train, another plan continues from a checkpoint, and the model loads."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed: list[str] = []
    for nproc, script, rest in COMMAND.findall(PAGE):
        command = [sys.executable, "-m", "torch.distributed.run", *nproc.split()]
        command += [str(ROOT / script), *rest.replace('"', "").split()]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(printed) == 3
    first = re.findall(r"'loss': '?([\d.]+)", printed[0])
    assert float(first[-1]) < float(first[0])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/trainer/model")
