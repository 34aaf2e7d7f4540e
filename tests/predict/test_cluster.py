"""A cluster as a file: presets write files that read back, and a wrong file is explained."""

from pathlib import Path

import pytest
import tomli_w

from shardwise.core.errors import InputError
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.cluster_file import cluster_of
from shardwise.prediction.cluster_presets import PRESETS


def text_of(cluster: Cluster) -> str:
    """The text of the file of a cluster."""
    return tomli_w.dumps(cluster.model_dump(exclude_none=True))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back(name: str, tmp_path: Path) -> None:
    """The text of a cluster is the file of the same cluster."""
    file = tmp_path / "cluster.toml"
    file.write_text(text_of(PRESETS[name]))
    assert cluster_of(file) == cluster_of(name) == PRESETS[name]


def changed(folder: Path, old: str, new: str) -> Path:
    """The file of h100-sxm with one text changed."""
    text = text_of(PRESETS["h100-sxm"])
    assert old in text
    file = folder / "cluster.toml"
    file.write_text(text.replace(old, new, 1))
    return file


WRONG = {
    "a value out of its range": (
        "devices_per_host = 8",
        "devices_per_host = 0",
        "devices_per_host = 0. Allowed: greater than 0. Write instead: devices_per_host = 8, as in",
    ),
    "a key that nobody knows": (
        "launch_s",
        "launch_ms",
        "unknown key device.launch_ms of a cluster.*Write instead: launch_s",
    ),
    "a section that is missing": (
        "[between]\nlatency_s = 4e-06\nbytes_per_s = 50000000000.0\n",
        "",
        "a cluster without between.*Write instead: .between. with latency_s, bytes_per_s",
    ),
    "a text for a number": (
        "memory_bytes_per_s = 3350000000000.0",
        'memory_bytes_per_s = "fast"',
        'device.memory_bytes_per_s = "fast". Allowed: a valid number',
    ),
    "no TOML": ("devices_per_host = 8", "devices_per_host 8", "which is not TOML"),
    "5000 brackets": ("devices_per_host = 8", "devices_per_host = " + "[" * 5000, "is not TOML"),
}


@pytest.mark.parametrize(("old", "new", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_explained(old: str, new: str, said: str, tmp_path: Path) -> None:
    """In one paragraph for each problem: what was given, what is allowed, and what to write."""
    with pytest.raises(InputError, match=said):
        cluster_of(changed(tmp_path, old, new))


def test_a_section_that_may_be_empty_has_an_empty_one_as_remedy(tmp_path: Path) -> None:
    """A number for it."""
    (tmp_path / "c.toml").write_text("collectives = 5")
    with pytest.raises(
        InputError, match=r"collectives = 5\. .* Write instead: collectives = \{\},"
    ):
        cluster_of(tmp_path / "c.toml")


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    """A name that is neither a preset nor a file."""
    with pytest.raises(InputError, match=r"the cluster 'h100-sx'.*Write instead: h100-sxm"):
        cluster_of("h100-sx")


def test_a_precision_without_a_peak_is_refused() -> None:
    """The error names the key that the file lacks."""
    with pytest.raises(InputError, match=r"peak_flops\.int8"):
        PRESETS["a100-80gb"].flops_per_s("int8")
