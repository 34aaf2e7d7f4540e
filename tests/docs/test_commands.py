"""Every command of every page runs, in the order in which the page shows them.

Each page has a folder of its own, with what its reader has already (`BEFORE`). Runs are short here
and on at most two ranks; what is for several hosts is read by torchrun's own parser.
"""

import json
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from shardwise.cli.main import main
from tests.docs.pages import PAGES, ROOT, blocks, file_of
from tests.migrate.test_migrate import DEEPSPEED, LAUNCHED, TITAN, titan, written
from tests.programs import run_program
from tests.train.runs import model_folder as small_model
from tests.train.test_chat import TRAINED, chat_tokenizer

#: What a page has for other machines, and what stands for it here.
HERE = {
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--nproc 8": "--nproc 2",
    "/data": ".",
    "dp4 zero3 bf16. --model gpt:small": "dp2 zero3' --model gpt:tiny",
}
#: What is smaller here of a run, and of the model of an example.
SHORT = {"train.warmup": 4}
SMALL = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.sequence": 32,
}
#: What is proved and measured where a command names no model.
MODEL = f"{ROOT}/tests/verify/small.py:build"
#: Programs that take a number of steps, and train for few here.
STEPPED = ("examples/hf.py",)
#: The plan of a command that a page shows to fail.
WRONG = "dp2 zero4"


def short(folder: Path, name: str) -> None:
    command = ["train", "examples/quickstart.toml", "--set", f"run.folder=runs/{name}"]
    run(folder, "shardwise", here(command))


def runs_before(folder: Path) -> None:
    short(folder, "quickstart")
    short(folder, "first")


def folder_before(folder: Path) -> None:
    small_model("llama", folder / "folder")
    small_model("llama", folder / "chat", vocab_size=TRAINED.size)
    chat_tokenizer().save_pretrained(folder / "chat")
    talk = [{"role": role, "content": "as before"} for role in ("user", "assistant")]
    (folder / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 90)


def callback_before(folder: Path) -> None:
    """The page's own callback, in the file that it names."""
    (mine,) = (b.text for b in blocks("docs/how-to/callbacks.md") if "def make()" in b.text)
    (folder / "mine.py").write_text(mine)


def script_before(folder: Path) -> None:
    (folder / "train.py").write_text("import shardwise as sw\n\nprint(sw.init())\n")
    text = (ROOT / "examples/quickstart.toml").read_text()
    (folder / "config.toml").write_text(text.replace("runs/quickstart", "runs/config"))


def others_before(folder: Path) -> None:
    """A configuration of each of three systems; the last, which is trained, of a small model."""
    small = {"model": {"name": "llama3"}, "training": TITAN["training"] | {"seq_len": 64}}
    for name, values in (
        ("ds_config.json", DEEPSPEED),
        ("default_config.yaml", LAUNCHED | {"distributed_type": "MULTI_CPU"}),
        ("llama3_8b.toml", titan(tensor_parallel_degree=2) | small),
    ):
        written(folder, values, name.rpartition(".")[2]).rename(folder / name)


def model_before(folder: Path) -> None:
    (folder / "model.py").write_text(file_of("docs/how-to/tables.md", "model.py"))


BEFORE: dict[str, Callable[[Path], None]] = {
    "docs/how-to/callbacks.md": callback_before,
    "docs/how-to/hugging-face.md": folder_before,
    "docs/how-to/launch.md": script_before,
    "docs/how-to/migrate.md": others_before,
    "docs/how-to/resume-and-export.md": runs_before,
    "docs/how-to/tables.md": model_before,
}


def here(argv: list[str]) -> list[str]:
    """The words of a command, for this machine: of a run, few steps of a small model."""
    line = shlex.join(argv)
    for there, own in HERE.items():
        line = re.sub(rf"{there}\b", own, line)
    found = shlex.split(line)
    if "--model" not in found and (found[0] == "verify" or "--measure" in found):
        found += ["--model", MODEL]
    if {*STEPPED} & {*found} and "--steps" not in found:
        found += ["--steps", "3"]
    if "train" not in found or "--dry-run" in found:
        return found
    if any("/mnt/nvme" in word or "billion" in word for word in found):
        return [*found, "--dry-run"]
    changed = SHORT | ({} if "--model" in found or "run.toml" in found else SMALL)
    if not re.search(r"train\.steps=\d\d\b", line):
        changed = {"train.steps": 16 if "--resume" in found else 12} | changed
    return [*found, *(word for key, n in changed.items() for word in ("--set", f"{key}={n}"))]


def run(folder: Path, program: str, argv: list[str]) -> None:
    """Run a command in the folder: our own in this process, as every command can be."""
    if program == "torchrun" and "--nnodes" in argv:
        get_args_parser().parse_args(argv)
    elif program == "shardwise":
        argv, _, file = (argv[:-2], ">", argv[-1]) if ">" in argv else (argv, "", "printed")
        with (
            (folder / file).open("w") as out,
            redirect_stdout(out),
            pytest.raises(SystemExit) as end,
        ):
            main(argv)
        assert end.value.code == (2 if WRONG in argv else 0), argv
    else:
        module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        done = run_program([*module, *argv])
        assert done.returncode == 0, (argv, done.stdout[-2000:], done.stderr[-3000:])


@pytest.mark.full
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.commands for b in blocks(p))])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each as it stands; files that the page shows are written before what follows them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("shardwise.cli.verify.STEPS", 1)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs/figures").mkdir(parents=True)
    BEFORE.get(page, lambda _: None)(tmp_path)
    for block in blocks(page):
        if block.title and "/" not in block.title:
            (tmp_path / block.title).write_text(block.text)
        shown = [shlex.split(command) for command, _ in block.printed]
        for program, *argv in block.commands:
            if [program, *argv] not in shown:  # another test runs it, and reads what it prints
                run(tmp_path, program, here(argv))
