"""Probes that hang, crash and raise; in real processes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from sgpu.health.checkup import Checkup, context_here
from sgpu.health.probe import Verdict

ROOT = pathlib.Path(__file__).parents[2]
# Forking is for a fresh process with one thread.
_SCRIPT = """
import ctypes, json, os, signal, time
from sgpu.health.isolation import run_all
from sgpu.health.probe import Context, Finding, Verdict

class Probe:
    kind = "gpu"
    def __init__(self, name, act):
        self.name, self._act = name, act
    def run(self, ctx, timeout_seconds):
        yield Finding(probe=self.name, kind="gpu", name="0", verdict=Verdict.OK, evidence="seen")
        self._act()

def fail():
    raise ValueError("no such counter")

acts = {
    "fine": lambda: None, "raises": fail, "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(600), "holds the GIL": lambda: ctypes.PyDLL(None).sleep(600),
    "exits": lambda: os._exit(0),
}
began = time.monotonic()
found = [f.to_dict() for f in run_all([Probe(*each) for each in acts.items()], Context(), 1.0)]
left = []
try:
    while True:
        pid, _ = os.waitpid(-1, 0)
        left.append(pid)
except ChildProcessError:
    pass
print(json.dumps({"found": found, "seconds": time.monotonic() - began, "killed": len(left)}))
"""


def test_each_probe_answers_within_the_deadline_or_is_unknown() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    seen = [f["probe"] for f in told["found"] if f["verdict"] == "OK"]
    assert seen == ["fine", "raises", "crashes", "hangs", "holds the GIL", "exits"], "what was told before stays told"
    unknown = {f["probe"]: f["evidence"] for f in told["found"] if f["verdict"] == "UNKNOWN"}
    assert unknown.keys() == {"raises", "crashes", "hangs", "holds the GIL"}
    assert "ValueError: no such counter" in unknown["raises"]
    assert "SIGSEGV" in unknown["crashes"]
    assert "no answer within 1 s" in unknown["hangs"]
    assert told["killed"] == 2, "those that hang were killed, and only they were left to collect"


def test_a_checkup_of_this_machine_needs_no_torch() -> None:
    findings = Checkup(context_here(disks=("/tmp",), gpus=()), timeout_seconds=30.0).wait()
    assert {"memory", "shared memory", "writable"} <= {finding.probe for finding in findings}
    assert all(finding.verdict is not Verdict.UNKNOWN for finding in findings), findings


def test_a_checkup_tells_of_a_bad_gpu_and_of_a_wedged_driver(machine: Any) -> None:
    machine.gpus({}, {"uncorrectable": 4})
    findings = Checkup(machine.context(), timeout_seconds=30.0).wait()
    (bad,) = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    assert (bad.scope, bad.probe) == ("gpu 1", "ECC")
    machine.gpus({}, hang_seconds=600)
    wedged = Checkup(machine.context(), timeout_seconds=1.0)
    began = time.monotonic()
    assert wedged.pids()
    (unknown,) = [finding for finding in wedged.wait() if finding.probe == "GPUs"]
    assert unknown.verdict is Verdict.UNKNOWN
    assert time.monotonic() - began < 30
    assert wedged.pids() == []


def test_a_checkup_whose_process_is_stopped_is_unknown(machine: Any) -> None:
    machine.gpus({}, hang_seconds=600)
    checkup = Checkup(machine.context(), timeout_seconds=0.5)
    os.kill(checkup.pids()[0], signal.SIGSTOP)
    findings = checkup.wait()
    assert [finding.verdict for finding in findings if finding.probe == "checks"] == [Verdict.UNKNOWN]


def test_a_checkup_that_is_closed_leaves_nothing(machine: Any) -> None:
    machine.gpus({}, hang_seconds=600)
    checkup = Checkup(machine.context(), timeout_seconds=60.0)
    pid = checkup.pids()[0]
    checkup.close()
    assert not pathlib.Path(f"/proc/{pid}").exists()
