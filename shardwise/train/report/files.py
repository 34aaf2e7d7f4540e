"""The files of a report: report.md and its pictures, report.html, and what is beside them."""

from collections.abc import Callable
from pathlib import Path

from shardwise.train.publish import publish
from shardwise.train.report import html, markdown, plots
from shardwise.train.report.section import (
    Bars,
    Curve,
    Drawing,
    Figure,
    HeatMap,
    ReportContents,
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
    _text(lambda: markdown.text(contents))(folder / REPORT)
    return failures


def _beside(contents: ReportContents, folder: Path) -> dict[str, Callable[[Path], object]]:
    """The files beside report.md, and what makes each of them."""
    found: dict[str, Callable[[Path], object]] = {
        section.picture: _drawn(section.figure)
        for section in contents.sections
        if section.figure is not None
    }
    found |= {name: _text(make) for name, make in contents.files.items()}
    return found | {PAGE: _text(lambda: html.page(contents, folder))}


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
