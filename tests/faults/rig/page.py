"""The table of cells as a page of the documentation: `python -m tests.faults.rig.page` writes it."""

from __future__ import annotations

import pathlib

from tests.faults.rig import selection
from tests.faults.rig.cells import KINDS, MOMENTS, Cell, all_cells

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "fault-matrix.md"
_HEAD = """# The fault matrix

Each kind of fault at each moment of a run, against real supervisors, workers and checkpoints: {sensible} cells, of
which {ci} run in CI and all with `NIGHTLY=true pytest tests/faults/test_matrix_cells.py`. CI's cover each kind in each
phase of a run, and each class of kinds at each moment. After each fault the same seven questions:

1. The final weights and optimizer state are those of the undisturbed run, to the bit.
2. Every epoch trained every sample exactly once; a step that was done again had the same samples and loss.
3. The last checkpoint holds the same bytes, none on the volume is damaged, and no start went on from an older one than
   was committed.
4. It ended in bounded time.
5. Status and messages are true: the state is the one below, as many failures are told as there were, and one of them
   names the cause.
6. Nothing is left: no process, shared memory, socket or temporary file.
7. A fresh run in the same home does what it does anywhere.

And the fault must have fired; one of the disk must have struck a file. What ends a run for good (a full disk, a
supervisor that was killed) is taken away, the run is resumed, and the same questions are asked. A disk that fails fails
for all processes of the run, from that moment on, in the place that is written (or read) next.

| sign | what the run does |
|---|---|
| on | goes on as if nothing had happened; a warning, where there is something to tell |
| again | fails once or more, restarts by itself, succeeds |
| FAILED, LOST | ends so, says why, and succeeds when it is resumed |
| - | makes no sense; see below |

Cells in **bold** run in CI. Where two are given, it is a matter of who comes first.

"""


def _sign(cell: Cell) -> str:
    if cell.why_not:
        return "-"
    signs = []
    for states in cell.end.states:
        if states[:-1]:
            signs.append(" ".join(states[:-1]))
            continue
        signs += ["on"] if min(cell.end.failures) == 0 else []
        signs += ["again"] if max(cell.end.failures) > 0 else []
    return " / ".join(dict.fromkeys(signs))


def text() -> str:
    ci = {cell.name for cell in selection.in_ci()}
    cells = {(cell.kind.name, cell.moment.name): cell for cell in all_cells()}
    lines = [_HEAD.format(sensible=len(selection.sensible()), ci=len(ci))]
    lines += [f"| | {' | '.join(KINDS)} |\n", f"|---|{'---|' * len(KINDS)}\n"]
    for moment in MOMENTS:
        signs = []
        for kind in KINDS:
            cell = cells[kind, moment]
            sign = _sign(cell)
            signs.append(f"**{sign}**" if cell.name in ci else sign)
        lines.append(f"| {moment} | {' | '.join(signs)} |\n")
    lines.append("\n## Which make no sense\n\n| kind | moment | why |\n|---|---|---|\n")
    lines += [f"| {c.kind.name} | {c.moment.name} | {c.why_not} |\n" for c in cells.values() if c.why_not]
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(text())
