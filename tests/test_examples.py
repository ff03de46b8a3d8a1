"""The examples run as they stand, with the demo model, real documents and no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(file.stem for file in EXAMPLES.glob("*.ipynb"))
LONGEST = 280  # seconds

pytestmark = pytest.mark.timeout(2 * LONGEST + 20)


@pytest.fixture(scope="module")
def environment(
    demo_folder: Path, demo_calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Offline, with the user's converted model and the widths measured so far, but with learned statistics of its own."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").symlink_to(demo_folder.parent, target_is_directory=True)
    if demo_calibration.exists():
        shutil.copy(demo_calibration, cache)
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]),
        "READER_RAG_CACHE": str(cache),
    }


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Iterator[Callable[[Any], None]]:
    """Runs a notebook. One kernel serves all, so that model and embedder are loaded once; each begins without names."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=LONGEST,
        kernel_name="python3",
        resources={"metadata": {"path": str(EXAMPLES)}},
    )

    def execute(notebook: Any) -> None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        client.nb = notebook
        client.execute(cleanup_kc=False)

    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        yield execute
        client.nb = nbformat.v4.new_notebook()
        client.execute()  # ends the kernel


def test_the_quickstart_streams_an_answer_and_says_what_happened(run: Callable[[Any], None]) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%run quickstart.py")])
    run(notebook)
    _, question, answer, facts = text_of(notebook.cells[-1]).split("\n\n", 3)
    assert question == "How does a while statement end?"
    assert len(answer.strip()) > 20
    assert "tokens per pass" in facts
    assert facts.endswith("identical: True\n")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str, run: Callable[[Any], None]) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    run(notebook)
    printed = {cell.id: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    everything = "\n".join(printed.values())
    assert "identical: True" in everything
    assert "identical: False" not in everything
    assert "reused" in everything or "accepted_by_source" in everything, "it says what drafting did"
    streamed = [printed[cell.id] for cell in notebook.cells if "for piece in" in cell.source]
    assert streamed
    assert all(len(text.strip()) > 20 for text in streamed)
    pages = [page for cell in notebook.cells for page in rich(cell, "text/html")]
    assert any("<mark>" in page for page in pages), "the answer with its spans is shown as HTML"
    tables = [table for cell in notebook.cells for table in rich(cell, "text/markdown")]
    assert any("tokens/s" in table for table in tables)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_small_and_without_outputs(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert len(notebook.cells) < 20
    for cell in notebook.cells:
        assert cell.id
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


def text_of(cell: Any) -> str:
    """What a cell printed to stdout."""
    return "".join(
        output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"
    )


def rich(cell: Any, kind: str) -> list[str]:
    """What a cell displayed as `kind`, such as text/html."""
    outputs = cell.get("outputs", [])
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]
