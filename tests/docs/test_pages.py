"""The pages: every program, link and output in them is that of the program."""

import ast
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from docs.measured import FILES, read
from tests.docs.pages import PAGES, ROOT, Block, blocks, text_of
from tests.programs import run_program

#: What differs from machine to machine: errors of rounding, and the time a prediction takes.
VARIES = re.compile(r"[0-9.]+e[+-][0-9]+|Computed in [0-9,.]+ ms")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
PROGRAMS = [(p, n) for p in PAGES for n, block in enumerate(blocks(p)) if block.whole]
PRINTED = [p for p in PAGES if any(block.printed for block in blocks(p))]
#: Folders of the package, whose files no page names.
INTERNAL = re.compile(
    r"\b(?:core|comm|engine|parallel|prediction|kernels|derive|checkpoint|models|verify|train|cli"
    r"|migrate|doctor|bench|tests)/[a-z_]+(?:\.py)?\b"
)


def ran(folder: Path, argv: list[str], code: int = 0) -> str:
    """What a command prints, 100 columns wide."""
    done = run_program(["-m", "shardwise.cli.main", *argv], folder, {"COLUMNS": "100"})
    assert done.returncode in (0, code), done.stderr
    return done.stdout or done.stderr


def test_every_page_is_in_the_navigation() -> None:
    """And the navigation has no other."""
    listed = re.findall(r"(\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == [p for p in PAGES if p != "README.md"]


@pytest.mark.cases(len(PAGES))
@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_file_of_the_package(page: str) -> None:
    """Users read what the program does, not where."""
    assert INTERNAL.findall(text_of(page)) == []


@pytest.mark.cases(3)
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/README.md"])
def test_links_from_the_root_lead_somewhere(page: str) -> None:
    """To files, and to headings in them; the site's own links are checked where it is built."""
    for path, anchor in LINK.findall(text_of(page)):
        target = (ROOT / page).parent / path
        assert target.exists(), path
        heads = re.findall(r"^#+ (.+)$", target.read_text() if anchor else "", re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not anchor or anchor[1:] in slugs, anchor


@pytest.mark.parametrize(
    "page", [p if p == "README.md" else pytest.param(p, marks=pytest.mark.full) for p in PRINTED]
)
def test_a_page_shows_what_the_command_prints(page: str, tmp_path: Path) -> None:
    """Line by line but for rounding and time; a line of dots stands for any others."""
    for command, shown in (each for block in blocks(page) for each in block.printed):
        found = ran(tmp_path, shlex.split(command)[1:], code=2)
        if found.startswith(("Given:", "2 things")):  # one paragraph, which the page folds
            assert " ".join(shown.split()) == " ".join(found.split())
            continue
        lines = [VARIES.sub("", line.rstrip()) for line in found.strip().splitlines()]
        for part in shown.strip().split("...\n"):
            wanted = [VARIES.sub("", line.rstrip()) for line in part.strip("\n").splitlines()]
            wanted = wanted[:-1] if wanted[-1:] == ["..."] else wanted
            assert part_of(wanted, lines), (wanted, found)


def part_of(wanted: list[str], lines: list[str]) -> bool:
    """Whether the lines have `wanted` in one piece, whatever space stands before the first."""
    wanted = [wanted[0].strip(), *wanted[1:]] if wanted else wanted
    size = len(wanted)
    pieces = (lines[start : start + size] for start in range(len(lines) - size + 1))
    return any([piece[0].strip(), *piece[1:]] == wanted for piece in pieces if piece) or not wanted


# --- programs --------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program_runs_as_shown(page: str, number: int) -> None:
    """A block that imports the package is a whole program: it runs as it stands, from no file."""
    argv = ["-W", "error", "-c", blocks(page)[number].text]
    if re.search(r"sw\.(spawn|verify)\(", argv[-1]):  # ranks are forked from the program
        done = subprocess.run([sys.executable, *argv], check=False, capture_output=True, text=True)
    else:
        done = run_program(argv)
    assert done.returncode == 0, done.stderr


@pytest.mark.cases(len(PAGES))
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_is_that_of_the_package(page: str) -> None:
    """Every block compiles, and every `sw.name` in it exists and takes its arguments."""
    for block in blocks(page):
        if block.language == "python" and not block.title.startswith("examples/"):
            for node in ast.walk(ast.parse(block.text)):
                require_known(node)


def require_known(node: ast.AST) -> None:
    """A name of the package exists; so do the keyword arguments that are passed to it."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sw":
        assert node.attr in sw.__all__
    if isinstance(node, ast.Call) and re.fullmatch(r"sw\.\w+", name := ast.unparse(node.func)):
        taken = inspect.signature(getattr(sw, name[3:])).parameters
        if all(each.kind != each.VAR_KEYWORD for each in taken.values()):
            assert {k.arg for k in node.keywords} <= set(taken), name


EXAMPLES = [b for p in PAGES for b in blocks(p) if b.title.startswith("examples/")]


@pytest.mark.cases(len(EXAMPLES))
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.title)
def test_a_part_of_an_example_is_in_it(block: Block) -> None:
    """What a page shows of a file is there, letter by letter."""
    assert block.text in text_of(block.title)


def test_what_replaces_another_system_runs_as_shown() -> None:
    """Each block of the page, without the lines that it replaces, is a whole program."""
    shown = [b.text for b in blocks("docs/how-to/migrate.md") if b.language == "diff"]
    assert len(shown) == 4
    lines = [[line[2:] for line in b.splitlines() if not line.startswith("-")] for b in shown]
    programs = ["\n".join(block) for block in lines]
    code = f"for program in {programs!r}: exec(program, {{}})"
    done = run_program(["-W", "error", "-c", code])
    assert done.returncode == 0, done.stderr


# --- words and numbers -----------------------------------------------------------------------


@pytest.mark.cases(len(FILES))
@pytest.mark.parametrize("name", FILES)
def test_the_data_of_measurements_are_tables(name: str) -> None:
    """Each run has a command of this repository and rows as long as its columns."""
    data: dict[str, Any] = read(name)
    assert data["title"] and data["says"]
    for run in data["run"]:
        assert all(len(row) == len(run["columns"]) for row in run["rows"])
        for file in re.findall(r"examples/\S+", run["command"]):
            assert (ROOT / file).is_file()


def test_the_readme_and_the_page_of_measurements_are_summaries() -> None:
    """The site builds the latter from files of data."""
    assert len(text_of("README.md").splitlines()) <= 150
    assert len(text_of("docs/explanation/measurements.md").splitlines()) <= 120
    machines = tomllib.loads(text_of("benchmarks/results/machines.toml"))
    used = {run["machine"] for name in FILES for run in read(name)["run"] if "machine" in run}
    assert used <= set(machines)
