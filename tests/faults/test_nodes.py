"""Two nodes on this machine: ranks, a node and the controller are lost, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgpu import Local, RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.contract.errors import AgentLostError
from sgpu.contract.outcome import read_outcome
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.testing.laws import survival

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_NODES, _WORLD, _STEPS = 2, 4, 36
# (generation, step) -> what happens there, and on which rank it is done.
_FAULTS = {
    (0, 6): {"kill rank 3": 3},
    (1, 12): {"kill node 1": 2},
    (2, 18): {"kill rank 1": 1, "kill node 1": 3},
    (3, 24): {"freeze agent 1": 0},
    (4, 30): {"kill agent 0": 0},
}


def _train(folder: str, disturbed: bool) -> torch.Tensor:
    import os
    import pathlib
    import signal
    import time

    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import TensorDataset

    import sgpu
    from sgpu import TrainLoop, settings
    from sgpu.contract import process, records
    from sgpu.data import DataLoader
    from sgpu.testing.laws.survival import Ledger

    device = sgpu.runtime.init()
    rank, generation, root = sgpu.runtime.rank(), settings.generation(), settings.run_dir()
    assert root is not None
    sgpu.seed_everything(100 + rank)  # the same in both runs

    def strike(step: int) -> None:
        faults = _FAULTS.get((generation, step), {}) if disturbed else {}
        for verb, kind, number in (what.split() for what, by in faults.items() if by == rank):
            records.append(
                pathlib.Path(folder, "fired"), {"fault": f"{verb} {kind} {number}", "generation": generation}
            )
            if kind == "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            agent = process.read_process((root if number == "0" else root / "nodes" / number) / "agent.json")
            assert agent is not None
            family = process.descendants(agent.pid) if kind == "node" else []
            assert agent.signal(signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            for pid in family:
                os.kill(pid, signal.SIGKILL)
            if verb == "freeze":
                time.sleep(60)  # nothing is closed, and no step is done until that is noticed

    ledger = Ledger(folder, rank)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    numbers = torch.arange(48, dtype=torch.float32)
    loader = DataLoader(TensorDataset(numbers), 2, shuffle=True, seed=5, num_workers=0)
    loop = TrainLoop(model=model, optimizer=optimizer, loader=loader, epochs=6, max_steps=_STEPS, checkpoint_every=3)
    for (batch,) in loop:
        strike(loop.step)
        optimizer.zero_grad()
        loss = model(batch[:, None].expand(-1, 4) / 48).square().mean()
        ledger.note(loop.step, samples=batch.tolist(), epoch=loop.epoch, loss=loss.item(), draw=float(torch.rand(())))
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_whatever_is_lost_the_run_ends_as_the_undisturbed_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, members: Callable[[Run], list[int]],
    left: Callable[[Run], list[int]], until: Callable[..., Any],
) -> None:  # fmt: skip
    monkeypatch.setenv("SGPU_NODE_TIMEOUT_SECONDS", "4")
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    expected = distributed(gpus=_WORLD)(_train).submit(str(undisturbed), False).result(120)

    policy = RestartPolicy(max_restarts=10, backoff_seconds=0.01)
    train = distributed(gpus=_WORLD, on=Local(nodes=_NODES), restarts=policy)(_train)
    run = train.submit(str(disturbed), True)
    with pytest.raises(AgentLostError, match=r"go on with run\.resume"):
        run.result(200)
    until(lambda: members(run) == [], "no process outlives its controller", 30)
    warnings = [event["message"] for event in run.events() if event["kind"] == "warning"]
    assert any(message.startswith("node 1 has lost its controller (its connection") for message in warnings)
    results = run.resume().result(120)

    fired = [(record["generation"], record["fault"]) for record in read_all(disturbed / "fired")]
    assert sorted(fired) == sorted((generation, what) for (generation, _), faults in _FAULTS.items() for what in faults)
    failures = [(event["generation"], event["cause"]) for event in run.events() if event["kind"] == "failure"]
    assert [generation for generation, _ in failures] == [0, 1, 2, 3]
    causes = [cause for _, cause in failures]
    assert causes[0] == "SIGKILL, signal 9"
    assert causes[1].startswith("node 1 was lost: its connection")
    assert causes[2].startswith(("node 1 was lost: its connection", "SIGKILL"))
    assert causes[3].startswith("node 1 was lost: it was silent for 4.")
    for result in results:
        assert torch.equal(result, expected[0])
    assert survival.check_same(undisturbed, disturbed, world_size=_WORLD) > 0, "nothing was lost"
    assert left(run) == []


def test_the_other_node_is_watched_asked_and_told_as_the_first(
    tmp_path: pathlib.Path, until: Callable[..., Any], left: Callable[[Run], list[int]]
) -> None:
    """A rank hangs there; it is given back; the run is cancelled; what its ranks return comes home."""
    policy = RestartPolicy(hang_seconds=1.0)

    @distributed(gpus=4, on=Local(nodes=2), restarts=policy)
    def train(folder: str) -> dict[str, str]:
        import os
        import pathlib
        import signal
        import time

        import torch

        import sgpu
        from sgpu import TrainLoop, settings

        here, rank = pathlib.Path(folder), sgpu.runtime.rank()
        sgpu.runtime.init()
        model = torch.nn.Linear(1, 1)
        loop = TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            max_steps=int((here / "steps").read_text()), checkpoint_every=10**6,
        )  # fmt: skip
        for step in loop:
            with (here / f"steps{rank}").open("a") as log:
                log.write(f"{step}\n")
            if settings.generation() == 0 and step == 5 and rank == 3:
                (here / "fired").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)
        names = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
        return {name: os.environ[name] for name in names}

    def done(rank: int) -> list[int]:
        file = tmp_path / f"steps{rank}"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    (tmp_path / "steps").write_text("1000000")
    run = train.submit(str(tmp_path))
    until(lambda: any(event["kind"] == "resumed" for event in run.events()), "it trains again", 90)
    assert (tmp_path / "fired").exists()
    failure = next(event for event in run.events() if event["kind"] == "failure")
    assert (failure["rank"], failure["step"], failure["cause"]) == (3, 5, "no step for 1 s")
    for rank in range(4):
        (tmp_path / f"steps{rank}").unlink()
    assert [(each.node, each.address) for each in run.status.nodes] == [(0, "127.0.0.2"), (1, "127.0.0.3")]

    agent = process.read_process(pathlib.Path(run.path) / "nodes" / "1" / "agent.json")
    assert agent is not None
    assert agent.signal(signal.SIGTERM), "the fault did not fire"
    assert run.wait(60) == "PREEMPTED"
    assert len({done(rank)[-1] for rank in range(4)}) == 1, "all nodes stop after the same step"
    assert left(run) == []

    run.resume()
    until(lambda: "restored" in {event["kind"] for event in run.events()}, "restored", 90)
    last = done(3)[-1]
    until(lambda: done(3)[-1] > last + 5, "it trains again")
    run.cancel()
    assert run.state == "CANCELLED"
    assert left(run) == []
    for rank in range(4):
        assert len(done(rank)) == len(set(done(rank))), "no step was done twice"

    (tmp_path / "steps").write_text(str(done(0)[-1] + 3))
    told = run.resume().result(90)
    assert [each.pop("RANK") for each in told] == ["0", "1", "2", "3"]
    assert [each.pop("LOCAL_RANK") for each in told] == ["0", "1", "0", "1"]
    assert [(each.pop("NODE_RANK"), each.pop("GROUP_RANK")) for each in told] == [("0", "0")] * 2 + [("1", "1")] * 2
    for each in told:
        assert each == {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2"}
    assert left(run) == []


def test_the_first_bad_rank_ends_all_nodes_at_once(
    tmp_path: pathlib.Path, until: Callable[..., Any], left: Callable[[Run], list[int]]
) -> None:
    @distributed(gpus=4, on=Local(nodes=2), restarts=0)
    def train(folder: str) -> None:
        import pathlib
        import time

        import sgpu

        here, rank = pathlib.Path(folder), sgpu.runtime.rank()
        (here / f"here{rank}").touch()
        while len(list(here.glob("here*"))) < 4:
            time.sleep(0.01)
        if rank == 2:
            raise ValueError("of rank 2")
        time.sleep(10_000)

    run = train.submit(str(tmp_path))
    with pytest.raises(ValueError, match="of rank 2") as caught:
        run.result(90)
    assert "rank 2, step 0" in str(caught.value.__cause__)
    outcome = read_outcome(RunDir(pathlib.Path(run.path)), 0, 2)
    assert outcome is not None
    assert run.events()[-1]["time"] - outcome.time < 15, "not when they would have ended by themselves"
    assert left(run) == []


def test_a_warm_spare_takes_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any],
    members: Callable[[Run], list[int]],
) -> None:  # fmt: skip
    """The node's agent is frozen, so that nothing is closed: the spare works in its place, and an end is made of it."""
    monkeypatch.setenv("SGPU_NODE_TIMEOUT_SECONDS", "4")

    @distributed(gpus=2, on=Local(nodes=2, spares=1))
    def train(folder: str) -> int:
        import pathlib
        import time

        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        import sgpu
        from sgpu import TrainLoop

        sgpu.runtime.init()
        model = DDP(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = TrainLoop(model=model, optimizer=optimizer, max_steps=10**6, checkpoint_every=5)
        for _ in loop:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            time.sleep(0.02)
            if pathlib.Path(folder, "end").exists() and loop.step % 10 == 0:
                break
        return loop.step

    def resumed() -> list[dict[str, Any]]:
        return [event for event in run.events() if event["kind"] == "resumed"]

    run = train.submit(str(tmp_path))
    root = pathlib.Path(run.path)
    until(lambda: run.status.step > 5 and {each.state for each in run.status.nodes} == {"ready"}, "all are ready", 90)
    lost, spare = (process.read_process(root / "nodes" / number / "agent.json") for number in ("1", "2"))
    assert lost is not None
    assert lost.signal(signal.SIGSTOP), "the fault did not fire"
    until(resumed, "it trains again", 30)
    assert process.read_process(root / "nodes" / "1" / "agent.json") == spare
    until(lambda: not lost.alive(), "the frozen agent is ended", 30)
    replacement = process.read_process(root / "nodes" / "2" / "agent.json")
    assert replacement is not None
    assert replacement.alive()
    assert replacement not in (lost, spare)
    failure = next(event for event in run.events() if event["kind"] == "failure")
    assert failure["message"].startswith("node 1 was lost: it was silent for 4.")
    (tmp_path / "end").touch()
    first, second = run.result(60)
    assert first == second
    assert run.status.restarts == 1
    until(lambda: members(run) == [], "nothing is left, also of the lost agent's checkpoint helper", 30)


def test_a_run_goes_on_without_a_node_and_takes_it_back(
    tmp_path: pathlib.Path, until: Callable[..., Any], left: Callable[[Run], list[int]]
) -> None:
    """The global batch is fixed: every batch is the one of the whole world's, whoever takes part."""

    @distributed(gpus=4, on=Local(nodes=2), restarts=RestartPolicy(min_gpus=2))
    def train(folder: str) -> int:
        import json
        import pathlib
        import time

        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import TensorDataset

        import sgpu
        from sgpu import TrainLoop
        from sgpu.data import DataLoader

        sgpu.runtime.init()
        rank, world = sgpu.runtime.rank(), sgpu.runtime.world_size()
        model = DDP(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        numbers = torch.arange(32, dtype=torch.float32)
        loader = DataLoader(TensorDataset(numbers), global_batch_size=8, shuffle=True, seed=5, num_workers=0)
        loop = TrainLoop(model=model, optimizer=optimizer, loader=loader, epochs=10**6, checkpoint_every=5)
        for (batch,) in loop:
            with pathlib.Path(folder, f"batches{rank}").open("a") as log:
                log.write(json.dumps([world, loop.step, batch.tolist()]) + "\n")
            optimizer.zero_grad()
            model(batch[:, None]).sum().backward()
            optimizer.step()
            time.sleep(0.02)
            if pathlib.Path(folder, "end").exists() and loop.step % 50 == 0:
                break
        return world

    def resized() -> list[tuple[int, int]]:
        found = [event for event in run.events() if event["kind"] == "resized"]
        return [(event["from_world_size"], event["to_world_size"]) for event in found]

    run = train.submit(str(tmp_path))
    until(lambda: run.status.step > 8, "it trains", 90)
    agent = process.read_process(pathlib.Path(run.path) / "nodes" / "1" / "agent.json")
    assert agent is not None
    family = [agent.pid, *process.descendants(agent.pid)]
    assert agent.signal(signal.SIGKILL), "the fault did not fire"
    for pid in family[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: resized() == [(4, 2)], "it goes on with the node that is left", 30)
    until(lambda: resized() == [(4, 2), (2, 4)], "it takes the other back", 60)
    before = run.status.step
    until(lambda: run.status.step > before + 5, "all train again", 60)
    (tmp_path / "end").touch()
    assert run.result(60) == [4, 4, 4, 4]
    assert run.status.restarts == 1

    taken: dict[int, dict[int, set[float]]] = {}
    for rank in range(4):
        for line in (tmp_path / f"batches{rank}").read_text().splitlines():
            world, step, batch = json.loads(line)
            taken.setdefault(step, {}).setdefault(world, set()).update(batch)
    worlds = {world for each in taken.values() for world in each}
    assert worlds == {2, 4}
    assert sorted(taken) == list(range(max(taken) + 1)), "no step is missing"
    order = [taken[step] for step in sorted(taken)]
    whole = [max(each.values(), key=len) for each in order]
    for each, batch in zip(order, whole, strict=True):
        assert len(batch) == 8
        assert all(samples <= batch for samples in each.values()), "a step done again, or in part only, is the same"
    for epoch in range(len(order) // 4):
        together = [sample for batch in whole[4 * epoch : 4 * epoch + 4] for sample in batch]
        assert sorted(together) == list(range(32)), f"epoch {epoch}: each sample once"
    assert left(run) == []
