"""What the documentation says agrees with the code."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from dataclasses import replace

from sgpu import settings
from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.limits import StepTimes
from sgpu.agent.judging.policy import Past, decide
from sgpu.contract import errors, events, rundir
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import FINAL_STATES, Status
from sgpu.metrics.names import BUILT_IN, SYSTEM

ROOT = pathlib.Path(__file__).parents[2]
_METRIC_ROW = re.compile(r"^\| `(?:system/rank<k>/)?([\w/]+)` \| ([^|]+) \| ([^|]+) \|", re.M)


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_relative_links_resolve(page: str, pages: dict[str, str]) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", pages[page]):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (ROOT / page).parent / place if place else ROOT / page
        if not path.exists():
            broken.append(target)
        elif anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            if anchor not in slugs:
                broken.append(target)
    assert broken == []


def test_run_folder_names_every_path_of_a_run(pages: dict[str, str]) -> None:
    said = code_spans(pages["docs/run-folder.md"])
    run = RunDir(pathlib.Path("/r"))
    paths = {
        str(value.relative_to(run.root))
        for name, kind in vars(RunDir).items()
        if isinstance(kind, property) and isinstance(value := getattr(run, name), pathlib.Path)
    }
    paths |= {"metrics/rank<k>.jsonl", "attempts/<generation>/rank<k>/log", "attempts/<generation>/rank<k>/outcome"}
    covered = {name.rstrip("/") for name in said} | {"attempts", "metrics"}
    assert paths - covered == set()
    drawn = set(re.findall(r"^ {4}(\S+)", rundir.__doc__ or "", re.M)) - {"attempts/<generation>/rank<k>/{log,"}
    assert {name.rstrip("/") for name in drawn} - covered == set()


def test_run_folder_names_every_field(pages: dict[str, str]) -> None:
    text = pages["docs/run-folder.md"]
    for kind, title in ((RunSpec, "spec.json"), (Status, "status.json")):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields - code_spans(section(text, title)) == set(), title
    assert FINAL_STATES - code_spans(text) == set()


def test_run_folder_names_every_event_and_no_other(pages: dict[str, str]) -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section(pages["docs/run-folder.md"], "events.jsonl"), re.M))
    assert set(told) == set(events.KINDS)
    facts = {kind: set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", meaning)) for kind, meaning in events.KINDS.items()}
    for kind, names in facts.items():
        assert names - code_spans(told[kind]) == set(), kind


def test_failure_modes_names_every_error(pages: dict[str, str]) -> None:
    names = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.SgpuError)
    }
    assert {name for name in names if name not in pages["docs/failure-modes.md"]} == set()


def test_failure_modes_gives_the_policy_as_it_is(pages: dict[str, str]) -> None:
    text, policy = " ".join(pages["docs/failure-modes.md"].split()), RestartPolicy()
    assert f"`restarts=` (default {policy.max_restarts})" in text
    assert policy.hang_seconds is None, "learned"
    learned = StepTimes()
    assert "10 minutes while there are fewer than 20 steps" in text
    assert [(learned.add(1.0), learned.limit_seconds(60))[1] for _ in range(20)] == [600] * 19 + [60]
    failure = Failure(kind="signal", rank=0, generation=0, step=5, cause="SIGKILL, signal 9", message="", time=0.0)
    past = [Past(failure=replace(failure, step=step), committed_step=-1) for step in range(9)]
    generous = RestartPolicy(max_restarts=100)
    waits = [decide(failure, past[:n], generous, committed_step=-1).wait_seconds for n in range(4)]
    assert "The first restart is immediate, later ones wait (1 s, 2 s, 4 s, at most a minute)" in text
    assert waits == [0, 1, 2, 4]
    assert decide(replace(failure, step=99), past, generous, committed_step=-1).wait_seconds == 60


def test_metrics_are_those_of_the_code(pages: dict[str, str]) -> None:
    rows = {(name, unit, meaning) for name, unit, meaning in re.findall(_METRIC_ROW, pages["docs/metrics.md"])}
    assert rows == {(name, metric.unit, metric.meaning) for name, metric in {**BUILT_IN, **SYSTEM}.items()}


def test_settings_are_all_told(pages: dict[str, str]) -> None:
    assert set(settings.NAMES) - code_spans(pages["docs/settings.md"]) == set()


def test_decisions_have_their_form(pages: dict[str, str]) -> None:
    """Numbered without a gap, listed, and each with problem, choice, what was turned down, when to look again."""
    notes = sorted(page for page in pages if re.fullmatch(r"docs/decisions/\d{4}-.*\.md", page))
    assert [int(pathlib.Path(note).name[:4]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        titles = re.findall(r"^## (.+)$", pages[note], re.M)
        assert titles == ["Problem", "Choice", "Turned down", "Look again"], note
        assert f"({pathlib.Path(note).name})" in pages["docs/decisions/README.md"]
        assert pages[note].startswith(f"# {pathlib.Path(note).name[:4]} ")


def test_lines_are_not_too_long_to_read(page: str, pages: dict[str, str]) -> None:
    long = [number for number, line in enumerate(pages[page].splitlines(), 1) if len(line) > 250]
    assert long == []
