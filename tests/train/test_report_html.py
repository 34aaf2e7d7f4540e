"""The report as a page: one file that shows each section, in a browser too."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from shardwise.train import run_folder as folder
from shardwise.train.end import publish_report
from shardwise.train.measure.baseline import Baseline
from shardwise.train.report import html, markdown
from shardwise.train.report.files import write
from shardwise.train.report.report_contents import contents_of
from shardwise.train.report.section import ReportContents
from shardwise.train.report.summary import RankCost, Summary
from tests.train.test_report import summary

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SECTIONS = ["Loss", "Memory", "Bytes", "Timeline", "Experts", "Plan", "Sample", "Run"]
PLAN = "dp2 pp2 ep2 1f1b:4 | head: zero2"
MIB = 2**20


def whole(path: Path) -> Summary:
    """A run with each section of a report."""
    held = {"parameters": 3 * MIB, "gradients": 3 * MIB, "optimizer": 6 * MIB}
    sent = {"dp all_reduce": 6 * MIB, "pp send": MIB}
    cost = RankCost(
        held, held, sent | {"ep all_to_all": MIB}, sent, {"ep all_to_all": (0, 2 * MIB)}
    )
    path.mkdir()
    given = summary(path, *[cost] * 4)
    loads = {f"blocks.{n}.moe": [9, 7, 1, 15] for n in range(2)}
    return replace(
        given,
        plan=PLAN,
        records=[replace(record, expert_loads=loads) for record in given.records],
        baseline=Baseline(held, {"dp all_reduce": 12 * MIB}),
        sample="<b>def</b> f(a & b):\n" + "x" * 300,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run whose name is markup."""
    return whole(tmp_path_factory.mktemp("runs") / "a<script>alert(1)<script>")


@pytest.fixture(scope="module")
def contents(run: Summary) -> ReportContents:
    return contents_of(run)


@pytest.fixture(scope="module")
def page(run: Summary) -> str:
    """The page as it is written, with its pictures."""
    assert write(contents_of(run), run.config.folder) == []
    return (run.config.folder / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing(page: str) -> None:
    """No script, no address but places in the page and its own pictures."""
    links = re.findall(r"""(?:src|href|srcset|action|data)=["']([^"']*)""", page)
    assert links and all(link.startswith(("#section-", "data:")) for link in links)
    assert not re.search(r"<script|<iframe|<object|@import|url\(", page)
    assert "default-src 'none'" in page


def test_text_of_the_run_is_escaped(page: str) -> None:
    """The run's name and sample are shown as text, not as HTML."""
    assert "a&lt;script&gt;alert(1)&lt;script&gt;" in page
    assert "&lt;b&gt;def&lt;/b&gt; f(a &amp; b):" in page


def test_the_page_and_the_markdown_say_the_same(contents: ReportContents, page: str) -> None:
    """Each section, sentence and cell of the one is in the other."""
    text = markdown.text(contents)
    assert re.findall(r"<h2>(.*)</h2>", page) == SECTIONS
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS[:-1]
    plain = re.sub("<code>|</code>", "`", page)
    for section in contents.sections:
        rows = section.table.rows if section.table else ()
        for said in (*section.sentences, *(cell for row in rows for cell in row)):
            assert said.replace("'", "&#39;") in plain
            assert said.replace("|", "\\|") in text or said in text


def test_the_answer_comes_first(contents: ReportContents, page: str) -> None:
    """The loss beside the baseline, then whether the run is as predicted."""
    assert contents.headline in page.partition("<h1>")[2].partition("</h1>")[0]
    assert [str(check) for check in contents.checks] == [
        "memory between steps: as predicted",
        "bytes sent: as predicted",
    ]
    for check in contents.checks:
        assert f"✓ {check}" in page


def test_a_difference_is_said(tmp_path: Path) -> None:
    """A rank that sends a byte too much."""
    run = whole(tmp_path / "run")
    wrong = replace(run.costs[3], predicted_sent=run.costs[3].sent | {"pp send": MIB + 1})
    told = replace(run, costs=[*run.costs[:3], wrong])
    page = html.page(contents_of(told), tmp_path)
    assert "✗ bytes sent: not as predicted" in page


def test_every_word_of_the_plan_is_explained(contents: ReportContents) -> None:
    """Those of single layers too, and the default of what no word says."""
    table = next(section.table for section in contents.sections if section.title == "Plan")
    assert table is not None
    words = [word for word, _ in table.rows]
    assert words == ["`pp2`", "`dp2`", "`ep2`", "`1f1b:4`", "`ddp`", "`zero2`"]
    assert ["`dp2`", "`dpN`: data parallelism on N ranks"] in table.rows
    assert table.rows[-1][1].endswith("gradients (only layers head)")


def test_the_end_says_how_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with both files; without the page if it cannot be made."""
    run = whole(tmp_path / "run")
    said = io.StringIO()
    publish_report(run, Console(file=said, width=300))
    line = f"report: {run.config.folder}/report.md"
    assert f"{line}; open {run.config.folder}/report.html in a browser\n" in said.getvalue()
    assert folder.has_report(run.config.folder)

    def broken(*_: object) -> str:
        raise ValueError("no page")

    (run.config.folder / "report.html").unlink()
    monkeypatch.setattr(html, "page", broken)
    publish_report(run, Console(file=said, width=300))
    assert f"{line}\n" in said.getvalue()
    assert "report.html could not be made (ValueError: no page)" in said.getvalue()


# --- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Headless Chromium; the test is skipped where it is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed (Debian's package chromium)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield opened
        opened.close()


#: The text of the page with less than 4.5 times the contrast to what is behind it (WCAG 2, AA).
FAINT = """() => {
  const rgba = text => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const over = (top, below) => below.map((c, k) => top[k] * top[3] + c * (1 - top[3]));
  const linear = c => c <= 10 ? c / 3294 : ((c / 255 + .055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = node => {
    const cell = node.matches("svg g text") && node.parentNode.querySelector("rect");
    if (cell) return rgba(getComputedStyle(cell).fill).slice(0, 3);
    const colors = [];
    for (let at = node; at; at = at.parentElement)
      colors.unshift(rgba(getComputedStyle(at).backgroundColor));
    return colors.reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const faint = [];
  let count = 0;
  for (const node of document.body.querySelectorAll(":not(title, style)")) {
    const texts = [...node.childNodes].filter(n => n.nodeType === Node.TEXT_NODE);
    const text = texts.map(n => n.data).join("").trim();
    if (!text) continue;
    count += 1;
    const style = getComputedStyle(node), back = behind(node);
    const front = over(rgba(node.matches("svg *") ? style.fill : style.color), back);
    const [more, less] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const ratio = (more + .05) / (less + .05);
    if (ratio < 4.5) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return [count, faint];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_shown_without_errors_and_can_be_read(
    scheme: Any, page: str, browser: "Browser", tmp_path: Path
) -> None:
    """On a phone's width too: each section in sight, no scrolling to the side, enough contrast."""
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    errors, requests = list[str](), list[str]()
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(file.as_uri())
    assert (errors, requests) == ([], [file.as_uri()])
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall("[0-9]+", background))) > 3 * 128) == (scheme == "light")
    for width in (360, 1200):
        tab.set_viewport_size({"width": width, "height": 740})
        assert fits(tab)
    count, faint = tab.evaluate(FAINT)
    assert count > 100 and faint == []
    assert (errors, requests) == ([], [file.as_uri()])
    tab.close()


def fits(tab: "Page") -> bool:
    """Whether each section is shown, with its figures, and the page is no wider than the window."""
    shown = [section for section in tab.locator("section").all() if section.is_visible()]
    figures = [figure.bounding_box() for figure in tab.locator("figure").all()]
    assert [section.locator("h2").inner_text() for section in shown] == SECTIONS
    assert len(figures) == 5 and all(
        box and min(box["width"], box["height"]) > 50 for box in figures
    )
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    return tab.evaluate(wide)
