"""report.html: the report as one file for a browser, which loads nothing else."""

import re
from importlib.resources import files
from typing import Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from shardwise.train.report.charts import HIGH, WIDE, charts
from shardwise.train.report.section import ReportContents

TEMPLATE: Final = "report.html.jinja"


def page(contents: ReportContents) -> str:
    """The text of report.html. All of the run's own text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": _code}
    source = files("shardwise.train.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    drawn = [(section, charts(section.figure)) for section in contents.sections]
    return environment.from_string(source).render(
        report=contents, sections=drawn, wide=WIDE, high=HIGH
    )


def _code(text: str) -> Markup:
    """The text with `backquoted` parts as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  escaped
