"""The notebook of examples/: its cells start two ranks, in a kernel of its own."""

from pathlib import Path

import pytest

from shardwise.comm.start.launch import can_fork
from tests.house import ROOT


@pytest.mark.full
def test_the_cells_of_the_notebook_train_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell runs; two ranks have the losses of one process, and the proof holds."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if not can_fork():
        pytest.skip("ranks are forked from the kernel: on Linux, without a GPU")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/two_ranks.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "rank 1: loss" in printed
    assert "equal losses: True" in printed
    assert "the proof holds: True" in printed
