"""Each kind of event in plain words. A record comes from a file: any fact may be missing or of another type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sgpu.widgets.reading.snapshot import Level
from sgpu.widgets.words import count, plain, plural, seconds, whole

Record = Mapping[str, Any]
_LOST = re.compile(r"\bsignal \d+|^exit\b|^SystemExit\b")


def sentence(record: Record) -> str:
    """The event in words; one of an unknown kind is named with its facts."""
    tell = _TELL.get(str(record.get("kind")))
    if tell is not None:
        return tell(record)
    facts = ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("time", "kind", "generation"))
    return plain(f"{record.get('kind')}: {facts}" if facts else record.get("kind"))


def level(record: Record) -> Level:
    """How much it matters: "detail" is left out where space is short."""
    kind = str(record.get("kind"))
    if kind == "run_ended":
        return {"SUCCEEDED": "good", "FAILED": "error", "LOST": "error"}.get(str(record.get("state")), "warning")  # type: ignore[return-value]
    return _LEVELS.get(kind, "info")


_LEVELS: dict[str, Level] = {
    "generation_started": "detail",
    "checkpoint_started": "detail",
    "checkpoint_committed": "good",
    "checkpoint_failed": "error",
    "checkpoint_copied": "detail",
    "checkpoint_not_copied": "warning",
    "checkpoint_removed": "detail",
    "failure": "error",
    "restarting": "warning",
    "resumed": "good",
    "resized": "warning",
    "node_joined": "detail",
    "node_lost": "warning",
    "diverged": "warning",
    "straggler": "warning",
    "preempted": "warning",
    "metrics_lost": "warning",
    "warning": "warning",
}


def _run_started(record: Record) -> str:
    nodes = whole(record.get("nodes"))
    spread = f" on {plural(nodes, 'node')}" if nodes is not None and nodes > 1 else ""
    return f"started with {plural(record.get('world_size'), 'worker')}{spread}"


def _resized(record: Record) -> str:
    before, after = whole(record.get("from_world_size")), whole(record.get("to_world_size"))
    why = "nodes are missing" if before is not None and after is not None and after < before else "nodes are back"
    return f"goes on with {plural(after, 'worker')} instead of {count(before)}: {why}"


def _node_joined(record: Record) -> str:
    return f"node {count(record.get('node'))} is here ({plain(record.get('address')) or 'address not told'})"


def _generation_started(record: Record) -> str:
    if not record.get("cause"):
        return "workers are starting"
    return f"workers are starting again (restart {count(record.get('generation'))})"


def _first_step(record: Record) -> str:
    return f"step {count(record.get('step'))} done, {seconds(record.get('seconds'))} after the workers' start"


def _restored(record: Record) -> str:
    where = {"memory": " from memory", "peer memory": " from other nodes' memory"}.get(plain(record.get("source")), "")
    again = whole(record.get("again_steps"))
    rest = f"; {plural(again, 'step')} to do again" if again else ""
    return f"restored step {count(record.get('step'))} in {seconds(record.get('seconds'))}{where}{rest}"


def _checkpoint_committed(record: Record) -> str:
    blocked, save = seconds(record.get("blocked_seconds")), seconds(record.get("save_seconds"))
    return f"checkpoint at step {count(record.get('step'))} ({blocked} blocked, {save} to save)"


def _checkpoint_failed(record: Record) -> str:
    return f"checkpoint of step {count(record.get('step'))} failed: {plain(record.get('message')) or 'no reason given'}"


def _checkpoint_not_copied(record: Record) -> str:
    why = plain(record.get("message")) or "no reason given"
    return f"{_share(record)} is not in the memory of node {count(record.get('node'))}: {why}"


def _share(record: Record) -> str:
    return f"rank {count(record.get('rank'))}'s share of the checkpoint of step {count(record.get('step'))}"


def failure_words(*, rank: Any, step: Any, cause: Any, message: Any) -> str:
    """Who failed, where and how, on one line: `rank 3 lost (signal 9) after step 1,214`."""
    cause, message = plain(cause), plain(message)
    who = "the run" if whole(rank) is None else f"rank {rank}"
    where = f" after step {count(step)}" if whole(step) else ""
    rest = f": {message}" if message else ""
    if _LOST.search(cause):
        return f"{who} lost ({cause}){where}"
    if cause == "hang" or cause.startswith("no step"):
        return f"{who} stopped making steps{where}{rest or f' ({cause})'}"
    if whole(rank) is None or not cause:
        return f"{who} failed{where}{rest or (f': {cause}' if cause else ', cause unknown')}"
    return f"{who} raised {'an error' if cause == 'exception' else cause}{where}{rest}"


def _failure(record: Record) -> str:
    return failure_words(**{name: record.get(name) for name in ("rank", "step", "cause", "message")})


def _restarting(record: Record) -> str:
    step = whole(record.get("from_step"))
    origin = f"from step {count(step)}" if step else "from the beginning"
    attempt = f" (attempt {count(record['attempt'])})" if whole(record.get("attempt")) is not None else ""
    backoff = record.get("backoff_seconds")
    return f"restarting {origin}{attempt}" + (f" after a wait of {seconds(backoff)}" if backoff else "")


def _resumed(record: Record) -> str:
    step = whole(record.get("from_step"))
    origin = f"from step {count(step)}" if step else "from the beginning"
    again = whole(record.get("recomputed_steps"))
    rest = f"; {plural(again, 'step')} done again" if again else "; no step done again" if again == 0 else ""
    return f"restarted {origin} in {seconds(record.get('seconds'))}{rest}"


def _preempted(record: Record) -> str:
    told = record.get("signal")
    name = f"signal {told}" if whole(told) is not None else plain(told)
    return f"asked to stop{f' ({name})' if name else ''}: saves a checkpoint, then ends"


def _metrics_lost(record: Record) -> str:
    number, cause = record.get("count"), plain(record.get("cause")) or "no cause given"
    return f"{plural(number, 'metric value')} {'was' if number == 1 else 'were'} lost: {cause}"


def _warning(record: Record) -> str:
    where = "" if whole(record.get("rank")) is None else f"rank {record['rank']}: "
    return where + (plain(record.get("message")) or "a warning without words")


def _run_ended(record: Record) -> str:
    state = str(record.get("state"))
    words = {
        "SUCCEEDED": "the run finished",
        "FAILED": "the run failed",
        "CANCELLED": "the run was cancelled",
        "PREEMPTED": "the run was preempted",
        "LOST": "the run's supervisor vanished",
    }.get(state, f"the run ended as {plain(state)}")
    message = plain(record.get("message"))
    return f"{words}: {message}" if message else words


_DONE = {"skip": "the batch is passed over", "roll_back": "back to the newest checkpoint", "stop": "the run ends"}


def _diverged(record: Record) -> str:
    words = (
        f"rank {count(record.get('rank'))}'s loss in step {count(record.get('step'))} is {plain(record.get('value'))}"
    )
    then = _DONE.get(str(record.get("action")))
    return f"{words}: {then}" if then else words


def _straggler(record: Record) -> str:
    does = "computes longer" if record.get("section") == "compute" else "waits longer for data"
    words = f"rank {count(record.get('rank'))} holds the others up: it {does}"
    ratio = record.get("ratio")
    if isinstance(ratio, (int, float)):
        words += f", {ratio:.1f} times as long as most"
    return words


_TELL: dict[str, Callable[[Record], str]] = {
    "run_started": _run_started,
    "generation_started": _generation_started,
    "first_step": _first_step,
    "restored": _restored,
    "checkpoint_started": lambda record: f"checkpoint of step {count(record.get('step'))} begun",
    "checkpoint_committed": _checkpoint_committed,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_copied": lambda record: f"{_share(record)} is in the memory of node {count(record.get('node'))} too",
    "checkpoint_not_copied": _checkpoint_not_copied,
    "checkpoint_removed": lambda record: f"checkpoint of step {count(record.get('step'))} removed",
    "failure": _failure,
    "restarting": _restarting,
    "resumed": _resumed,
    "resized": _resized,
    "node_joined": _node_joined,
    "node_lost": lambda record: plain(record.get("message")) or f"node {count(record.get('node'))} was lost",
    "diverged": _diverged,
    "straggler": _straggler,
    "bottleneck": lambda record: plain(record.get("message")) or "where the time goes is not told",
    "epoch_ended": lambda record: f"epoch {count(record.get('epoch'))} ended",
    "preempted": _preempted,
    "metrics_lost": _metrics_lost,
    "warning": _warning,
    "run_ended": _run_ended,
}
