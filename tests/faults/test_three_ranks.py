"""Of three ranks, one dies between backward and step, and one while it hands its metrics over: none falls behind."""

from __future__ import annotations

import pathlib
from collections import Counter

import pytest

from sgpu import RestartPolicy, distributed
from tests.faults.rig import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_all_end_with_the_same_steps_and_each_sample_was_trained_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, notes, fired = tmp_path / "volume", tmp_path / "notes", tmp_path / "fired"
    job.make_volume(volume)
    notes.mkdir()
    monkeypatch.setenv("SGPU_FAILPOINT", "job.before_step@1%4!=kill; metrics.flush@2#3!=kill")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(fired))
    run = distributed(gpus=3, restarts=RestartPolicy(backoff_seconds=0.01))(job.train).submit(str(volume), str(notes))
    results = run.result(100)
    lines = fired.read_text()
    assert "job.before_step" in lines
    assert "metrics.flush" in lines
    assert run.status.restarts in (1, 2), "the second death may come while the first is answered"
    assert len({result["digest"] for result in results}) == 1
    (steps,) = {result["steps"] for result in results}
    ledger = job.read_ledger(notes)  # a step that was done again has to be the same
    assert sorted(ledger) == [0, 1, 2]
    assert all(sorted(done) == list(range(1, steps + 1)) for done in ledger.values())
    for epoch in range(job.EPOCHS):
        trained = Counter(
            sample for done in ledger.values() for at, samples, _ in done.values() if at == epoch for sample in samples
        )
        assert trained == Counter(range(job.FILES)), f"epoch {epoch}"
