"""The pages of the documentation, and what is in their blocks of code."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Every page that a user reads, by its path from the root.
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *DOCS.rglob("*.md")]
)
FENCE = re.compile(
    r'^(?P<open>```)(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
#: A command, to its end or to the two spaces before what it does.
COMMAND = re.compile(r"^(?:\$ )?(shardwise|python|torchrun) (.+?)(?:  .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, the file that it shows, and its text."""

    page: str
    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command; of code in a language, none."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        found = [] if self.language else COMMAND.findall(joined)
        return [[program, *shlex.split(rest)] for program, rest in found]

    @property
    def printed(self) -> list[tuple[str, str]]:
        """Each command after a dollar sign, and what is shown below it."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return [(command, shown) for command, _, shown in (p.partition("\n") for p in parts)]

    @property
    def whole(self) -> bool:
        """Whether it is a program that runs as it stands."""
        return self.language == "python" and not self.title and "import shardwise" in self.text


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [
        Block(page, found["language"], found["title"] or "", found["text"])
        for found in FENCE.finditer(text_of(page))
    ]


def programs(page: str) -> list[str]:
    return [block.text for block in blocks(page) if block.whole]


def file_of(page: str, title: str) -> str:
    (found,) = [block.text for block in blocks(page) if block.title == title]
    return found
