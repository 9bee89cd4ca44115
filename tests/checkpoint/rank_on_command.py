"""One of several ranks: lives as often as it is told to, a JSON line each; `rank_on_command.py RANK WORLD MEETING`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.contract import failpoint

rank = int(sys.argv[1])
reads: list[str] = []


class Own:
    n = 0

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Files of checkpoints that are opened."""
    if event == "open" and "/step-" in str(arguments[0]):
        reads.append(str(arguments[0]))


def live(root: str, helper: str, generation: int, steps: list[tuple[int, str]]) -> list[Any]:
    """Saves `steps`, with what is to fail in each; or restores, and tells step, source, whether a file was read, and
    how many checkpoints were passed over.
    """
    os.environ["SGPU_CHECKPOINT_HELPER"] = helper
    box, own = {f"w{i}": torch.zeros(100_000) for i in range(8)}, Own()
    policy = CheckpointPolicy(root, peer_memory=True, on_error="warn")
    said: list[Any] = []
    with Checkpointer(policy, {"box": box}, per_rank={"own": own}, replicated={"box"}, generation=generation) as c:
        if not steps:
            reads.clear()
            restored = c.restore()
            assert restored is not None
            assert all(bool((w == restored.step).all()) for w in box.values())
            assert own.n == restored.step * 10 + rank
            said = [restored.step, restored.source, bool(reads), len(restored.skipped)]
        for step, point in steps:
            os.environ["SGPU_FAILPOINT"] = point
            failpoint.reset()
            for w in box.values():
                w.fill_(step)
            own.n = step * 10 + rank
            c.save(step)
            c.wait()
            said += [report.error for report in c.poll()]
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=int(sys.argv[2]))
    sys.addaudithook(note)
    for line in sys.stdin:
        print(json.dumps(live(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
