"""The files of a report: report.md and its pictures, report.html, and what is beside them.

report.html is one file for a browser, which loads nothing else; report.md shows pictures beside it.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from shardwise.train.data.packed import publish
from shardwise.train.report import plots
from shardwise.train.report.section import (
    Bars,
    Curve,
    Drawing,
    Figure,
    HeatMap,
    ReportContents,
    ReportTable,
    Section,
)
from shardwise.train.run_folder import PAGE, REPORT


def write(contents: ReportContents, folder: Path) -> list[str]:
    """Write the report into the run's folder; what failed, a sentence each.

    A file that cannot be made is missing; the rest is made. Raises OSError without report.md.
    """
    failures = []
    for name, make in _beside(contents, folder).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
        except Exception as error:  # noqa: BLE001  a library may raise anything; the run is saved
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failures.append(f"{path} could not be made ({why})")
    _text(lambda: markdown(contents))(folder / REPORT)
    return failures


def _beside(contents: ReportContents, folder: Path) -> dict[str, Callable[[Path], object]]:
    """The files beside report.md, and what makes each of them."""
    found: dict[str, Callable[[Path], object]] = {
        section.picture: _drawn(section.figure)
        for section in contents.sections
        if section.figure is not None
    }
    found |= {name: _text(make) for name, make in contents.files.items()}
    return found | {PAGE: _text(lambda: page(contents, folder))}


def _drawn(figure: Figure) -> Callable[[Path], object]:
    """What draws the figure into a file."""
    match figure:
        case Curve():
            return lambda path: plots.loss(path, figure)
        case Bars():
            return lambda path: plots.bars(path, figure)
        case HeatMap():
            return lambda path: plots.heat_map(path, figure)
        case Drawing():
            return _text(lambda: figure.svg)


def _text(make: Callable[[], str]) -> Callable[[Path], None]:
    """What writes the text that `make` returns."""

    def write_text(path: Path) -> None:
        publish(path, lambda beside: beside.write_text(make(), encoding="utf-8"))

    return write_text


TEMPLATE: Final = "report.html.jinja"


def page(contents: ReportContents, folder: Path) -> str:
    """The text of report.html, with the pictures in `folder`. The run's own text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": _code}
    source = files("shardwise.train.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    shown = [(section, _figure(section, folder)) for section in contents.sections]
    return environment.from_string(source).render(report=contents, sections=shown)


def _figure(section: Section, folder: Path) -> dict[str, str]:
    """The figure of a section: its own SVG, or its picture; neither if that was not made."""
    if isinstance(section.figure, Drawing):
        return {"drawing": section.figure.svg, "png": ""}
    file = folder / section.picture
    found = b64encode(file.read_bytes()).decode() if file.is_file() else ""
    return {"drawing": "", "png": found}


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
