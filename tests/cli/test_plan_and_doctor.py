from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

import sgpu as package
from sgpu.cli import doctor
from sgpu.cli.plan import Job, knobs
from sgpu.cli.screen import in_bytes, in_time


def test_plan_tells_the_known_figures(sgpu: Any) -> None:
    """1 % a GPU-year, 30 days, 1,024 GPUs: 57.1 %."""
    told = sgpu("plan", "--gpus", 1024, "--days", 30)
    assert told.exit_code == 0, told.output
    assert "chance of at least one failure: 57.1%" in told.stdout


def test_plan_by_measured_failures(sgpu: Any) -> None:
    """8.6 failures a day, two hours between checkpoints, nothing else costs: 68.4 % by the exact form."""
    told = sgpu(
        "plan", "--failures-a-day", 8.6, "--interval", 7200,
        "--stall", 0, "--durable", 0, "--detection", 0, "--restart", 0,
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "goodput at 2 h: 68.4%" in told.stdout


def test_plan_with_a_price(sgpu: Any) -> None:
    told = sgpu("plan", "--gpus", 100, "--days", 10, "--failures-a-day", 5, "--price", 2)
    hours, money = re.findall(r"lost: ([\d,.]+) GPU hours of 24,000, ([\d,]+) of money", told.stdout)[0]
    assert float(money.replace(",", "")) == pytest.approx(2 * float(hours.replace(",", "")), abs=1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--days", 0), "--days"),
        (("--days", "nan"), "--days"),
        (("--yearly", 1.0), "yearly_probability"),
        (("--yearly", 0), "--yearly"),
        (("--failures-a-day", 0), "failures_a_day"),
        (("--interval", -1), "interval_seconds"),
        (("--stall", -1), "stall_seconds"),
        (("--gpus", 0), "--gpus"),
        (("--price", "nan"), "--price"),
    ],
)
def test_plan_refuses_by_name(sgpu: Any, arguments: tuple[object, ...], named: str) -> None:
    told = sgpu("plan", *arguments)
    assert told.exit_code == 2
    assert named in told.stderr
    assert "Traceback" not in told.output


def test_the_knob_that_matters_most() -> None:
    """Ten minutes to notice a failure, everything else small: detection."""
    job = Job(mtbf_seconds=10_000, stall_seconds=1, durable_seconds=1, detection_seconds=600, restart_seconds=10)
    told = [name for _, name in knobs(job, job.best_interval_seconds()) if name != "failures"]
    assert told[0] == "detection"


def test_units() -> None:
    assert [in_bytes(n) for n in (0, 999, 1500, 2 * 10**9)] == ["0 B", "999 B", "1.5 kB", "2 GB"]
    assert [in_time(s) for s in (0.5, 41, 720, 11520, 440640)] == ["0.5 s", "41 s", "12 min", "3.2 h", "5.1 days"]


def test_doctor_tells_versions_places_and_gpus(sgpu: Any, home: Any) -> None:
    told = sgpu("doctor")
    assert told.exit_code == 0, told.output
    for expected in (package.__version__, sys.executable, str(home), "/dev/shm", "torch", "GPUs", "mlflow.db", "local"):
        assert expected in told.stdout


def test_a_pipe_has_no_edge_at_which_a_path_would_be_folded(sgpu: Any, monkeypatch: Any, tmp_path: Any) -> None:
    home = tmp_path / ("long" * 50) / ("longer" * 30)
    monkeypatch.setenv("SGPU_HOME", str(home))
    monkeypatch.setattr(doctor, "_TORCH", "print('2', None, 0, sep='\\n')")
    assert f"{home}/mlflow.db" in sgpu("doctor").stdout


def test_doctor_tells_what_is_bad(sgpu: Any, monkeypatch: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SGPU_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(doctor, "_TORCH", "raise SystemExit('no torch here')")
    told = sgpu("doctor")
    assert told.exit_code == 1
    assert "cannot be written" in told.stdout
    assert "no torch here" in told.stdout


def test_doctor_waits_for_no_wedged_driver(sgpu: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "_TORCH", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.2)
    told = sgpu("doctor")
    assert told.exit_code == 1
    assert "did not answer" in told.stdout


def test_doctor_goes_on_after_a_setting_that_cannot_be_read(sgpu: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SGPU_MIN_FREE_DISK_BYTES", "plenty")
    monkeypatch.setattr(doctor, "_TORCH", "print('2', None, 0, sep='\\n')")
    told = sgpu("doctor")
    assert told.exit_code == 1
    assert "SGPU_MIN_FREE_DISK_BYTES must be a whole number" in told.stdout
    assert "local" in told.stdout


def test_doctor_keeps_passwords_and_tells_of_a_server_that_is_down(sgpu: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setattr(doctor, "_TORCH", "print('2', None, 0, sep='\\n')")
    told = sgpu("doctor")
    assert told.exit_code == 0, told.output
    assert "secret" not in told.output
    assert "does not answer" in told.stdout


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from sgpu.cli import main\n"
        "sys.argv = ['sgpu', '--version']\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in ('torch', 'mlflow', 'IPython', 'anywidget') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sgpu {package.__version__}\n[]\n"


def test_an_unknown_command(sgpu: Any) -> None:
    told = sgpu("nope")
    assert told.exit_code == 2
    assert "nope" in told.stderr


def test_doctor_names_a_bad_gpu(sgpu: Any, monkeypatch: Any, tmp_path: Any) -> None:
    healthy = {"uncorrectable": 0, "remap_failed": False, "throttles": 0}
    recorded = tmp_path / "gpus.json"
    recorded.write_text(json.dumps({"gpus": [{"index": 0, **healthy}, {"index": 1, **healthy, "uncorrectable": 3}]}))
    monkeypatch.setenv("SGPU_HEALTH_RECORDED", str(recorded))
    told = sgpu("doctor")
    assert told.exit_code == 1
    assert re.search(r"gpu 1: ECC\s.*BAD.*3 uncorrectable errors", told.stdout)
    assert re.search(r"gpu 0: figures\s.*ok", told.stdout)
    assert "known answers" in told.stdout
