"""report.html: the report as one file for a browser, which loads nothing else."""

import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from shardwise.train.report.section import Drawing, ReportContents, Section

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
