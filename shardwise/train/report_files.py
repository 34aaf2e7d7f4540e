"""The files of a report: report.md and its pictures, and report.html, which loads no other file."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path, PurePosixPath
from typing import Final

from markdown_it import MarkdownIt

from shardwise.train.data.packed import publish
from shardwise.train.report_contents import ReportContents, ReportTable, Section
from shardwise.train.run_folder import PAGE, REPORT

#: What stands before the text of the page.
HEAD: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }}
img {{ max-width: 100%; background: #fff; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8886; }}
</style>
"""


def write(contents: ReportContents, folder: Path) -> list[str]:
    """Write the report into the run's folder; returns a sentence for each failure."""
    made = {s.picture: s.draw for s in contents.sections if s.draw is not None}
    text = markdown(contents)
    made |= {**contents.files, PAGE: lambda: page(contents.title, text, folder)}
    failures = []
    for name, make in made.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, make)
        except Exception as error:  # noqa: BLE001  a library may raise anything; the run is saved
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            failures.append(f"{path} could not be made ({why})")
    _write(folder / REPORT, lambda: text)
    return failures


def _write(path: Path, make: Callable[[], str]) -> None:
    publish(path, lambda beside: beside.write_text(make(), encoding="utf-8"))


def page(title: str, text: str, folder: Path) -> str:
    """The text of report.html: that of report.md, with the pictures in `folder` inside."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'<img src="([^"]*)" alt="([^"]*)" />', partial(_picture, folder), body)
    return HEAD.format(title=escape(title)) + body


def _picture(folder: Path, image: re.Match[str]) -> str:
    """The picture in base64; nothing if it was not made."""
    file = folder / image[1]
    data = b64encode(file.read_bytes()).decode() if file.is_file() else ""
    return f'<img alt="{image[2]}" src="data:image/svg+xml;base64,{data}">' if data else ""


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
