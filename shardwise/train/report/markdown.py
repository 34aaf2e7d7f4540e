"""report.md: the report as Markdown, with its figures as pictures beside it."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from shardwise.train.report.section import ReportContents, ReportTable, Section


def text(contents: ReportContents) -> str:
    """The text of report.md."""
    rows = ReportTable(["", ""], contents.rows)
    lines = [f"# {contents.title}", "", f"**{contents.headline}**", ""]
    lines += [*(f"- {check}" for check in contents.checks), "", *_table(rows), ""]
    for section in contents.sections:
        lines += _section(section)
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "")
    if section.picture:
        yield from (f"![{PurePosixPath(section.picture).stem}]({section.picture})", "")
    for sentence in section.sentences:
        yield from (sentence, "")
    if section.table is not None:
        yield from (*_table(section.table), "")


def _table(table: ReportTable) -> Iterator[str]:
    yield _row(table.head)
    yield "|---" * len(table.head) + "|"
    yield from map(_row, table.rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
