"""How long tests take: `tests/durations.txt`, and the ten files that take longest.

    python -m tests.durations             runs every test that CI and `make nightly` choose from
    python -m tests.durations FILE...     reads reports that pytest --junitxml=FILE wrote

A line of the file has the seconds of a test function under `make test`, those of its other cases,
their numbers, and its name; functions of less than half a second in all are left out.
"""

import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

FOUND = Path(__file__).with_suffix(".txt")
LEAST_S, SHOWN = 0.5, 10
CHOSEN = ["-n", "2", "--dist", "worksteal", "-m", "not combination"]


def read(report: Path) -> list[tuple[str, bool, float]]:
    """Each case of a report: its test function, whether it is core, its seconds."""
    return [
        (
            f"{case.get('classname', '')}.{case.get('name', '').partition('[')[0]}",
            case.find("properties/property[@name='core']") is not None,
            float(case.get("time", 0)),
        )
        for case in ET.parse(report).iter("testcase")  # noqa: S314 (our own report)
    ]


def main(reports: list[str]) -> None:
    """Write the file, and print the slowest files of tests."""
    with tempfile.TemporaryDirectory() as folder:
        if not reports:
            reports = [f"{folder}/report.xml"]
            command = [sys.executable, "-m", "pytest", *CHOSEN, f"--junitxml={reports[0]}"]
            subprocess.run(command, check=False)
        cases = [case for report in reports for case in read(Path(report))]
    seconds, files = defaultdict[tuple[str, bool], float](float), defaultdict[str, float](float)
    numbers = Counter[tuple[str, bool]]()
    for name, core, took in cases:
        seconds[name, core] += took
        numbers[name, core] += 1
        files[name.rpartition(".")[0]] += took
    names = {name: seconds[name, True] + seconds[name, False] for name, _ in numbers}
    slow = sorted((name for name in names if names[name] >= LEAST_S), key=lambda n: -names[n])
    FOUND.write_text(
        "   core    rest  cases        test\n"
        + "".join(
            f"{seconds[n, True]:7.1f} {seconds[n, False]:7.1f} {numbers[n, True]:4d} "
            f"{numbers[n, False]:5d}  {n}\n"
            for n in slow
        )
    )
    whole = sum(names.values())
    for name, took in sorted(files.items(), key=lambda pair: -pair[1])[:SHOWN]:
        print(f"{took:7.1f} s  {took / whole:4.0%}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
