"""Two ranks are killed at random moments of saving, again and again: no torn load, no acknowledged step lost."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.contract.process import this_process

ROUNDS = 1000 if os.environ.get("NIGHTLY") == "true" else 50
REPOSITORY = pathlib.Path(__file__).parents[2]

HOST = """
import random, select, signal
import torch.distributed as dist

def live(rank, generation, out):
    meet = f"file://{ROOT}.meet{generation}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    box = {"w": torch.zeros(50_000)}
    c = Checkpointer(CheckpointPolicy(ROOT, keep_last=2), {"box": box}, rank=rank, world_size=2, generation=generation)
    restored = c.restore()
    step = restored.step if restored else 0
    assert bool((box["w"] == step).all()), (step, box["w"])
    os.write(out, f"r{rank} {step} {restored.source if restored else 'nothing'}\\n".encode())
    while True:
        step += 1
        box["w"].fill_(step)
        c.save(step)
        for report in c.poll():
            os.write(out, f"{'failed' if report.error else 'saved'} {report.step} {report.error}\\n".encode())

def fork(rank, generation, out):
    pid = os.fork()
    if pid == 0:
        try:
            live(rank, generation, out)
        finally:
            os._exit(1)
    return pid

def kill(pids):
    statuses = []
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        statuses.append(os.waitpid(pid, 0)[1])
    return statuses

draw = random.Random(int(os.environ["SEED"]))
acknowledged, sources = 0, {}
for generation in range(int(os.environ["ROUNDS"])):
    reader, writer = os.pipe()
    pids = [fork(rank, generation, writer) for rank in (0, 1)]
    os.close(writer)
    lines, text, told = [], "", []
    goal = draw.randrange(4)  # saves, and then a moment more
    while len(told) < 2 or sum(line.startswith("saved") for line in lines) < goal:
        part = os.read(reader, 65536).decode()
        assert part, ("both ranks ended", lines)
        text += part
        *whole, text = text.split("\\n")
        lines += whole
        told = [line.split() for line in lines if line.startswith("r")]
    select.select([], [], [], draw.random() * 0.05)
    draw.shuffle(pids)
    assert kill(pids) == [signal.SIGKILL] * 2
    while part := os.read(reader, 65536).decode():
        text += part
    os.close(reader)
    lines += text.split("\\n")[:-1]
    assert not [line for line in lines if line.startswith("failed")], lines
    (_, first, source), (_, second, _) = told[0], told[1]
    assert first == second, told
    assert int(first) >= acknowledged, (told, acknowledged)
    sources[source] = sources.get(source, 0) + 1
    acknowledged = max([int(first)] + [int(line.split()[1]) for line in lines if line.startswith("saved")])
print(acknowledged, sources)
"""


@pytest.mark.timeout(120 + 3 * ROUNDS)
def test_kills_at_random_moments(run_ok: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    name = f"sgpu-{this_process().pid}-{this_process().started}-random"
    helper = subprocess.Popen(
        [sys.executable, "-m", "sgpu.checkpoint.helper", "--name", name, "--ranks", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        assert helper.stdout.readline() == "ready\n"
        (out,) = run_ok(
            HOST, SGPU_CHECKPOINT_HELPER=name, ROUNDS=str(ROUNDS), SEED="20", timeout_seconds=100 + 3 * ROUNDS
        )
    finally:
        helper.stdin.close()
        helper.stdout.close()
        helper.wait(60)
    acknowledged, _, sources = out.partition(" ")
    assert int(acknowledged) > ROUNDS / 2
    assert "memory" in sources
