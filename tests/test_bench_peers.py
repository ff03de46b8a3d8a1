"""The peers bench: pooled figures, paired intervals, the same run twice, and the real model's run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reader_rag.bench.live_peers import compare_live
from reader_rag.bench.peers import Result, compare_recordings, report, summary
from reader_rag.bench.plot import plot_curve, plot_peers
from reader_rag.bench.recording import Recording, save_recording
from reader_rag.bench.runs import Learning
from reader_rag.bench.systems import PEERS, ReaderSystem
from reader_rag.cli import main
from reader_rag.errors import MissingExtraError, SettingsError

PNG = b"\x89PNG"


def recordings() -> list[Recording]:
    """Four requests in two sets that copy from their prompts, with the model's expectations."""
    made = []
    for number in range(4):
        text = [10 + (number * 7 + n * n) % 23 for n in range(30)]
        known = [*text, 5, *text[3:25]]
        rows = np.array([[token, 40 + token % 3] for token in known[1:]], np.int32)
        probs = np.tile(np.array([0.6, 0.3], np.float32), (len(rows), 1))
        group = "rag" if number % 2 else "qa"
        prompt, output = tuple(known[:31]), tuple(known[31:])
        made.append(Recording(f"{group}-{number:03d}", group, prompt, output, True, (), rows, probs))
    return made


def test_every_peer_is_compared_with_reader_at_one_width() -> None:
    result = compare_recordings(recordings(), ReaderSystem, width=8, progress=False)
    assert result["rows"] == 4
    assert set(PEERS) <= set(result["peers"])
    assert result["peers"]["plain"]["tokens_per_pass"] == 1.0
    assert result["peers"]["plain"]["ci95"] == [1.0, 1.0]
    ours = result["reader"]["tokens_per_pass"]
    assert 1.5 < ours <= 8
    for name, entry in result["peers"].items():
        difference = result["paired_difference"][name]
        assert difference["mean"] == pytest.approx(ours - entry["tokens_per_pass"], abs=1e-3)
        assert difference["ci95"][0] <= difference["mean"] + 1e-9
        assert difference["mean"] <= difference["ci95"][1] + 1e-9
        assert entry["speedup_vs_generate"] is None
    assert set(result["by_set"]) == {"qa", "rag"}
    assert result == compare_recordings(recordings(), ReaderSystem, width=8, progress=False)
    text = report(result)
    assert all(name in text for name in (*PEERS, "reader", "qa: 2 prompts"))


def test_peers_can_be_chosen_and_learn_as_asked() -> None:
    result = compare_recordings(
        recordings(), ReaderSystem, width=8, names=["sam"], learning=Learning(folds=2), progress=False
    )
    assert list(result["peers"]) == ["sam"]
    assert "2 folds" in result["learning"]
    with pytest.raises(SettingsError, match="unknown peer 'best': choose from plain"):
        compare_recordings(recordings(), ReaderSystem, width=8, names=["best"], progress=False)


def test_figures_are_pooled_and_differences_paired_by_prompt() -> None:
    # READER needs one pass fewer on every prompt, long or short.
    passes = [10, 40, 20, 5]
    results = {
        "generate": [Result(40, 40, 4.0)] * 4,
        "peer": [Result(40, count + 1, 2.0) for count in passes],
        "reader": [Result(40, count, 1.0) for count in passes],
    }
    figures = summary(results, ["a"] * 4)
    assert figures["reader"]["tokens_per_pass"] == pytest.approx(160 / 75, abs=1e-4)
    assert figures["reader"]["tokens_per_s"] == 40.0
    assert figures["reader"]["speedup_vs_generate"] == 4.0
    assert figures["peers"]["peer"]["speedup_ci95"] == [2.0, 2.0]
    low, high = figures["paired_difference"]["peer"]["ci95"]
    assert 0 < low < 160 / 75 - 160 / 79 < high
    spread = figures["reader"]["ci95"][1] - figures["reader"]["ci95"][0]
    assert high - low < spread / 3, "paired: prompts differ more than systems do"
    assert "by_set" not in figures


def test_the_intervals_are_the_same_in_every_run() -> None:
    sizes = [7 + n * n % 13 for n in range(15)]
    results = {
        "peer": [Result(40, size + n % 3) for n, size in enumerate(sizes)],
        "reader": [Result(40, size) for size in sizes],
    }
    assert summary(results, ["a"] * 15) == summary(results, ["a"] * 15)


def test_the_command_replays_prints_and_draws(tmp_path: Path, tiny_model: Path, capsys: Any) -> None:
    for one in recordings():
        save_recording(tmp_path / "rec", one)
    plot = tmp_path / "figures" / "peers.png"
    command = ["bench", "peers", "--recordings", str(tmp_path / "rec"), "--model", str(tiny_model), "--json"]
    assert main([*command, "--width", "8", "--peers", "sam,plain", "--carry", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["width"] == 8
    assert {"rows", "peers", "reader", "paired_difference"} <= set(result)
    assert "carried from request to request" in err
    assert plot.read_bytes().startswith(PNG)
    assert main([*command, "--sets", "nothing"]) == 2
    assert "its sets are: qa, rag" in capsys.readouterr().err
    curve = ["bench", "curve", *command[2:], "--tests", "2", "--plot", str(tmp_path / "curve.png")]
    assert main(curve) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert [point["seen"] for point in points] == [0, 1, 2]
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_with_a_model_every_system_gives_the_same_tokens(reader: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {
            "id": str(n),
            "set": "x/rag",
            "question": f"What is a chunk {n}?",
            "passages": [{"text": "A chunk is."}],
        }
        for n in range(2)
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    result = compare_live(reader, file, max_tokens=10, progress=False)
    assert result["identical_to_plain"] == result["identical_to_generate"] == result["rows"] == 2
    assert {"generate", "transformers_prompt_lookup", *PEERS} <= set(result["peers"])
    assert result["peers"]["generate"]["tokens_per_pass"] == 1.0
    assert result["peers"]["plain"]["tokens_per_pass"] == 1.0
    assert result["peers"]["generate"]["speedup_vs_generate"] == 1.0
    assert result["reader"]["speedup_vs_generate"] > 0
    assert plot_peers([result], tmp_path / "live.png").read_bytes().startswith(PNG)
    assert "x generate" in report(result)


def test_without_matplotlib_a_plot_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r'pip install "reader-rag\[bench\]"'):
        plot_curve({"points": [], "tests": 1, "width": 8}, tmp_path / "x.png")
