"""`reader-rag bench fit`: trusts as often as a source was right, strengths by how much answers differ."""

import random
from pathlib import Path

import numpy as np
import pytest

from reader_rag.bench.fit import _beta, fit, show
from reader_rag.bench.recording import Recording, save_recording
from reader_rag.cli import main
from reader_rag.draft import Priors, make_drafter
from reader_rag.errors import SettingsError


def recording(seed: int, right: float, soft: bool = False) -> Recording:
    """The prompt says what follows every token; the answer follows it with probability `right`."""
    rng = random.Random(seed)
    following = rng.sample(range(60), 60)
    prompt = [token for pair in ((t, following[t], 60 + t) for t in range(60)) for token in pair]
    output = [0]
    while len(output) < 60:
        output.append(following[output[-1]] if rng.random() < right else rng.randrange(60))
    count = len(prompt) + len(output)
    ids = np.array([[rng.randrange(60), rng.randrange(60)] for _ in range(count)], np.int32) if soft else None
    probs = np.full((count, 2), 0.4, np.float32) if soft else None
    return Recording(f"rag-{seed:03d}", "rag", tuple(prompt), tuple(output), top_ids=ids, top_probs=probs)


def trust(table: Priors, name: str, level: int) -> float:
    a, b = table.counts[name, level]
    return a / (a + b)


def test_sources_are_trusted_as_often_as_they_were_right() -> None:
    often, seldom = (
        fit([recording(seed, right) for seed in range(6)], made_by="test", rounds=2) for right in (0.9, 0.2)
    )
    assert trust(often, "context", 21) > trust(seldom, "context", 21) + 0.2
    assert often.made_by == "test"


def test_what_was_recorded_with_the_models_predictions_fits_both_kinds_of_evidence() -> None:
    table = fit([recording(seed, 0.5, soft=True) for seed in range(4)], made_by="test", rounds=1)
    levels = {level for name, level in table.counts if name == "context"}
    assert {1, 21} <= levels
    assert any(name == "ngrams" for name, _ in table.counts)


def test_answers_that_differ_make_a_weak_prior() -> None:
    alike = _beta([(10.0, 20.0)] * 10)
    unlike = _beta([(1.0, 20.0), (19.0, 20.0)] * 5)
    assert alike is not None
    assert unlike is not None
    assert sum(alike) > 50
    assert sum(unlike) < 6
    assert alike[0] / sum(alike) == pytest.approx(unlike[0] / sum(unlike)) == pytest.approx(0.5)
    assert _beta([(1.0, 2.0)]) is None, "too few claims to say anything"


def test_every_position_of_the_output_scores_the_sources() -> None:
    drafter = make_drafter(["context"], priors=Priors({}))
    show(recording(0, 1.0), drafter, score=True)
    assert sum(claims for (_, level), (_, claims) in drafter.learned().items() if level) >= 50
    silent = make_drafter(["context"], priors=Priors({}))
    show(recording(0, 1.0), silent)
    assert silent.learned() == {}


def test_the_command_writes_a_table_that_says_how_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        save_recording(tmp_path / "rec", recording(seed, 0.7))
    out = tmp_path / "table.json"
    argv = ["bench", "fit", "--recordings", str(tmp_path / "rec"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["reader-rag", *argv])
    assert main(argv) == 0
    assert "fitted on 3 answers" in capsys.readouterr().err
    table = Priors.load(out)
    assert table.counts
    assert table.made_by == f"reader-rag {' '.join(argv)}"


def test_too_little_to_fit_on_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="at least 2"):
        fit([recording(0, 0.5)], made_by="test")
    assert main(["bench", "fit", "--recordings", str(tmp_path), "--responses", "x"]) != 0
    assert "--responses names answers of a --data file" in capsys.readouterr().err
