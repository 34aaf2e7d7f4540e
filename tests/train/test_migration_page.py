"""The programs of docs/how-to/migrate.md, before and after, train the same weights on two ranks."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.comm.test_start import free_port
from tests.programs import start_program

ROOT = Path(__file__).parents[2]
BLOCKS = ("DistributedDataParallel", "fully_shard", "accelerate")
#: Runs a program and prints the sum and the norm of the trained weights on rank 0.
AROUND = """
import json, os, sys, torch
torch.manual_seed(0)
program = sys.argv[1]
names = {}
exec(program, names)
import shardwise as sw
model = names["model"]
if "import shardwise" in program:
    state = sw.full_state_dict(model)
else:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    state = dict(enumerate(whole))
if os.environ["RANK"] == "0":
    weights = torch.cat([x.detach().flatten() for x in state.values()]).double()
    sys.stdout.write(json.dumps([weights.sum().item(), weights.norm().item()]))
"""


def program(name: str, sign: str) -> str:
    """The lines of a block with `sign` and without any; a GPU's calls are a processor's."""
    page = (ROOT / "docs/how-to/migrate.md").read_text(encoding="utf-8")
    block = page.split(f"**{name}**")[1].split("```diff\n")[1].split("```")[0]
    other = "-" if sign == "+" else "+"
    lines = [line[2:] for line in block.splitlines() if not line.startswith(other)]
    return re.sub(r"\.cuda\(\)", "", "\n".join(lines)).replace('"nccl"', '"gloo"')


def trained(code: str) -> list[float]:
    """The sum and the norm of the weights that a program trains on two ranks."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared["ACCELERATE_USE_CPU"] = "true"
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [start_program(["-c", AROUND, code], variables=shared | each) for each in own]
    found = [each.communicate(timeout=120) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], found
    return json.loads(found[0][0])


@pytest.mark.full
@pytest.mark.parametrize("name", BLOCKS)
def test_before_and_after_train_the_same(name: str) -> None:
    """The page's program for the other system, and the one that replaces it."""
    if name == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    assert trained(program(name, "-")) == pytest.approx(trained(program(name, "+")), rel=1e-5)
