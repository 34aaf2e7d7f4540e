"""The drawings: the figures of the papers in letters, and SVG that is to scale."""

from xml.etree import ElementTree as ET

from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.draw import as_svg, as_text
from shardwise.core.schedule.library import build


def drawn(word: str, ranks: int, costs: ActionCosts | None = None) -> list[str]:
    return [line[8:].rstrip() for line in as_text(clock(build(word, ranks), costs)).splitlines()]


def test_the_figure_of_gpipe():
    """Forwards down, backwards up, the last microbatch first: figure 2c, at B = 2F."""
    assert drawn("gpipe:3", 3) == [
        "F0 F1 F2 .. .. .. .. .. .. B2 -- B1 -- B0 --",
        ".. F0 F1 F2 .. .. .. B2 -- B1 -- B0 -- .. ..",
        ".. .. F0 F1 F2 B2 -- B1 -- B0 -- .. .. .. ..",
    ]


def test_the_figure_of_1f1b():
    """The steady state of one backward and one forward, and the drain."""
    assert drawn("1f1b:4", 3) == [
        "F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --",
        ".. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..",
        ".. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..",
    ]


def test_the_figure_of_zb_h1():
    """W where a rank would wait: figure 3 of the paper, at F = I = W."""
    assert drawn("zb-h1:4", 3) == [
        "F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3",
        ".. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        ".. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_the_second_chunk_has_small_letters():
    """A rank of two stages names the second one's actions in small letters; more are numbered."""
    assert drawn("interleaved:2x2", 2)[1].split()[:4] == ["..", "F0", "F1", "f0"]
    assert drawn("interleaved:2x3", 2)[1].split()[:4] == ["....", "F1.0", "F1.1", "F3.0"]


def test_a_column_is_the_shortest_action():
    """Fractions of it are rounded to columns; what takes no time is left out."""
    assert drawn("1f1b:1", 2, ActionCosts(F=0.5, B=1.5, hop=0.1)) == [
        "F0 .. .. .. .. B0 -- --",
        ".. F0 B0 -- -- .. .. ..",
    ]
    assert drawn("naive", 2, ActionCosts(F=1, B=1, hop=0.6))[1] == ".. .. F0 B0 .."
    assert drawn("naive", 1, ActionCosts(0, 0, 0)) == [""]


def test_svg_is_to_scale():
    """One box an action, as wide as its time, in its rank's row; the title is escaped."""
    timeline = clock(build("1f1b:2", 2))
    root = ET.fromstring(as_svg(timeline, "a < b"))  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"
    groups = root.findall(f"{space}g")
    found = {}
    for group in groups:
        name = group.findtext(f"{space}title")
        box = group.find(f"{space}rect")
        assert name is not None and box is not None
        found[name.split()[0]] = (float(box.get("x", 0)), float(box.get("width", 0)))
    assert len(found) == 8
    unit = found["F0.0"][1]
    assert found["B0.0"][1] == 2 * unit
    assert found["F1.0"][0] - found["F0.0"][0] == unit
    assert root.findtext(f"{space}text") == "a < b"


def test_an_svg_has_room_for_its_title_and_an_axis_of_time():
    """A short schedule's drawing is as wide as its words; marks of time stand where time is."""
    timeline = clock(build("naive", 2))
    title = "a title of many words, more than its drawing has room for"
    root = ET.fromstring(as_svg(timeline, title, unit=("ms", 1000)))  # noqa: S314 - our own text
    assert int(root.get("width", 0)) >= 7 * len(title)
    space = "{http://www.w3.org/2000/svg}"
    marks = [text for text in root.findall(f"{space}text") if text.get("class") == "m"]
    assert [text.text for text in marks] == ["0", "5000"]
    boxes = {group.findtext(f"{space}title"): group for group in root.findall(f"{space}g")}
    box = boxes["B0.0 4 to 6"].find(f"{space}rect")
    assert box is not None
    middle = float(box.get("x", 0)) + float(box.get("width", 0)) / 2
    assert float(marks[1].get("x", 0)) == middle  # of 6 seconds, the fifth
    assert "ms" in [text.text for text in root.findall(f"{space}text")]
