"""The files of a report: report.md and its pictures, and report.html, which loads no other file."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from shardwise.train.data.packed import publish
from shardwise.train.report_contents import ReportContents, ReportTable, Section
from shardwise.train.run_folder import PAGE, REPORT

TEMPLATE: Final = "report.html.jinja"


def write(contents: ReportContents, folder: Path) -> list[str]:
    """Write the report into the run's folder; returns a sentence for each failure."""
    made = {s.picture: s.draw for s in contents.sections if s.draw is not None}
    made |= {**contents.files, PAGE: lambda: page(contents, folder)}
    failures = []
    for name, make in made.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, make)
        except Exception as error:  # noqa: BLE001  a library may raise anything; the run is saved
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failures.append(f"{path} could not be made ({why})")
    _write(folder / REPORT, lambda: markdown(contents))
    return failures


def _write(path: Path, make: Callable[[], str]) -> None:
    publish(path, lambda beside: beside.write_text(make(), encoding="utf-8"))


def page(contents: ReportContents, folder: Path) -> str:
    """The text of report.html, with the pictures in `folder`. The run's own text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": _code}
    source = files("shardwise.train").joinpath(TEMPLATE).read_text(encoding="utf-8")
    shown = [(section, _picture(section, folder)) for section in contents.sections]
    return environment.from_string(source).render(report=contents, sections=shown)


def _picture(section: Section, folder: Path) -> str:
    """In base64; "" if the section has none, or it was not made."""
    file = folder / section.picture
    return b64encode(file.read_bytes()).decode() if file.is_file() else ""


def _code(text: str) -> Markup:
    """The text with `backquoted` parts as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  escaped


def markdown(contents: ReportContents) -> str:
    """The text of report.md."""
    rows = ReportTable(["", ""], contents.rows)
    lines = [f"# {contents.title}", "", f"**{contents.headline}**", ""]
    lines += [*(f"- {check}" for check in contents.checks), "", *_markdown_table(rows), ""]
    for section in contents.sections:
        lines += _markdown_section(section)
    return "\n".join(lines)


def _markdown_section(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "")
    if section.picture:
        yield from (f"![{PurePosixPath(section.picture).stem}]({section.picture})", "")
    for sentence in section.sentences:
        yield from (sentence, "")
    if section.table is not None:
        yield from (*_markdown_table(section.table), "")


def _markdown_table(table: ReportTable) -> Iterator[str]:
    yield _markdown_row(table.head)
    yield "|---" * len(table.head) + "|"
    yield from map(_markdown_row, table.rows)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
