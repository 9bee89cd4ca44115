"""Recovery: SIGKILL of rank 1 of 2 to the first step that the last rank trains afterwards, beside torchrun.

Goals: 2 s or better on an idle machine, and never an extra attempt. Both checkpoint every 5 steps of 20 ms.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from typing import Any

from tests.benchmarks import jobs
from tests.benchmarks.peers import PEERS
from tests.benchmarks.table import show

_KILL_AFTER_STEP = 30
_TOTAL = 80


def _recover(peer: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = PEERS[peer](folder, total=_TOTAL, every=5)
        deadline = time.time() + 60
        while True:
            victims = [line for line in jobs.lines(folder) if line["rank"] == 1 and line["step"] >= _KILL_AFTER_STEP]
            if victims:
                break
            if time.time() > deadline:
                raise RuntimeError(f"{peer} did not reach step {_KILL_AFTER_STEP}")
            time.sleep(0.005)
        killed = time.time()
        os.kill(victims[0]["pid"], signal.SIGKILL)
        ended_well = started.wait(30)
        firsts: dict[int, float] = {}
        pids = {line["rank"]: line["pid"] for line in jobs.lines(folder) if line["time"] <= killed}
        for line in jobs.lines(folder):
            if line["pid"] != pids[line["rank"]]:
                firsts[line["rank"]] = min(line["time"], firsts.get(line["rank"], line["time"]))
        seconds = max(firsts.values()) - killed if len(firsts) == 2 else float("nan")
        return {"seconds": seconds, "clean": ended_well and started.restarts() == 1}


def run(quick: bool) -> list[dict[str, Any]]:
    rounds = 2 if quick else 10
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer in PEERS:
            found[peer].append(_recover(peer))
    rows = []
    for peer, results in found.items():
        seconds = [result["seconds"] for result in results if result["clean"]] or [float("nan")]
        rows.append(
            {
                "peer": peer,
                "median s": statistics.median(seconds),
                "min s": min(seconds),
                "max s": max(seconds),
                "clean (one restart, ended well)": f"{sum(result['clean'] for result in results)} of {rounds}",
            }
        )
    return rows


if __name__ == "__main__":
    show(run(quick=False))
