"""Start: `import sgpu`, and a call to the first step of both workers, beside bare torchrun on the same job.

Goals: import under 50 ms with no third-party module; the first step at most 1.3 times torchrun's (MLflow on).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from typing import Any

from tests.benchmarks import jobs
from tests.benchmarks.peers import PEERS
from tests.benchmarks.table import show

_IMPORT = """
import sys, time
before = set(sys.modules); at = time.perf_counter(); import sgpu; seconds = time.perf_counter() - at
other = {n.partition(".")[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"sgpu"}
print(seconds, len(other))
"""


def _import() -> dict[str, Any]:
    runs = [
        subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(7)
    ]
    milliseconds = sorted(float(seconds) * 1e3 for seconds, _ in runs)
    return {
        "what": "import sgpu, ms",
        "median": statistics.median(milliseconds),
        "min": milliseconds[0],
        "max": milliseconds[-1],
        "note": f"{runs[0][1]} third-party modules",
    }


def _first_step(peer: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = PEERS[peer](folder, total=3, every=1000)
        if not started.wait(120):
            raise RuntimeError(f"{peer} did not end well")
        firsts: dict[int, float] = {}
        for line in jobs.lines(folder):
            firsts[line["rank"]] = min(line["time"], firsts.get(line["rank"], line["time"]))
        return max(firsts.values()) - started.began


def run(quick: bool) -> list[dict[str, Any]]:
    """Rounds are interleaved; the ratio is taken pair by pair."""
    rounds = 2 if quick else 7
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer in PEERS:
            seconds[peer].append(_first_step(peer))
    rows = [_import()]
    for peer, found in seconds.items():
        rows.append(
            {
                "what": f"call to first step, s: {peer}",
                "median": statistics.median(found),
                "min": min(found),
                "max": max(found),
            }
        )
    ratios = [ours / theirs for ours, theirs in zip(seconds["sgpu"], seconds["torchrun"], strict=True)]
    rows.append(
        {"what": "sgpu / torchrun", "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    )
    return rows


if __name__ == "__main__":
    show(run(quick=False))
