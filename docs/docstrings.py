"""The house's docstrings as Markdown: rows of a name and its text become a list.

steps   how many steps are compared          - **`steps`**: how many steps are compared
        and drawn                      -->     and drawn
device: "cpu" or "cuda"                      - **`device`**: "cpu" or "cuda"
"""

import re

NAME = r"[A-Za-z_]\w*(?:, \w+)*"
#: A row of a table of names: the text begins two or more spaces after the name.
ROW = re.compile(rf"^({NAME})  +(\S.*)$")
#: A name and a colon, as of an argument.
COLON = re.compile(rf"^({NAME}): (\S.*)$")
#: Where a section of Google's style begins, which mkdocstrings reads itself.
SECTION = re.compile(r"^(Raises|Returns|Args|Yields|Attributes):$")


def rows(text: str) -> list[tuple[str, str]]:
    """The rows of a docstring: names and their texts, with continued lines."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if match := ROW.match(line):
            found.append((match[1], match[2]))
        elif found and line.startswith("  ") and line.strip():
            name, said = found.pop()
            found.append((name, f"{said} {line.strip()}"))
        elif found:
            break
    return found


def markdown(text: str, names: frozenset[str] = frozenset()) -> str:
    """The docstring with its rows, and its `name:` lines of the arguments `names`, as lists."""
    lines: list[str] = []
    rest, within = "", False
    for line in text.splitlines():
        rest = rest or ("rest" if SECTION.match(line) else "")
        match = ROW.match(line) or COLON.match(line)
        named = match is not None and (ROW.match(line) or set(match[1].split(", ")) <= names)
        if rest:
            lines.append(line)
        elif match is not None and named:
            lines += [""] * (not within and bool(lines) and bool(lines[-1]))
            lines.append(f"- **`{match[1]}`**: {match[2]}")
            within = True
        elif within and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
            within = False
    return "\n".join(lines)
