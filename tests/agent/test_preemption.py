"""Notices that a machine is to be given back: clouds' metadata services, a file, a signal; and what time they leave."""

from __future__ import annotations

import http.server
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import pytest

from sgpu import settings
from sgpu.agent.notices import CLOUDS, Aws, Azure, Gcp, Notice, NoticeFile, source_of
from sgpu.agent.preemption import Preemption, Watch, grace_seconds
from sgpu.contract.errors import InputError
from sgpu.contract.exits import ExitCode, exit_code
from sgpu.contract.status import State, Status


class Metadata:
    """A metadata service: what it answers, by path; 404 elsewhere; 401 without the header that a cloud wants."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.wanted: tuple[str, str] | None = None
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.command, self.path))
                text = outer.answers.get(self.path)
                if outer.wanted is not None and self.headers.get(outer.wanted[0]) != outer.wanted[1]:
                    self.send_error(401)
                elif text is None:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(text.encode())

            def do_PUT(self) -> None:
                outer.asked.append((self.command, self.path))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"the token")

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata()
    yield service
    service.close()


def test_aws_tells_two_minutes_before(metadata: Metadata) -> None:
    metadata.wanted = ("X-aws-ec2-metadata-token", "the token")
    source = Aws(metadata.url)
    assert source.look() is None
    metadata.answers["/latest/meta-data/spot/instance-action"] = (
        '{"action": "terminate", "time": "2030-09-18T08:22:00Z"}'
    )
    deadline = datetime(2030, 9, 18, 8, 22, tzinfo=timezone.utc).timestamp()
    assert source.look() == Notice(cause="AWS: the spot instance is to terminate", deadline=deadline)
    assert [method for method, _ in metadata.asked] == ["PUT", "GET", "GET"], "one token serves for long"


def test_google_tells_thirty_seconds_before(metadata: Metadata) -> None:
    metadata.wanted = ("Metadata-Flavor", "Google")
    instance, source = "/computeMetadata/v1/instance", Gcp(metadata.url)
    metadata.answers = {f"{instance}/preempted": "FALSE", f"{instance}/maintenance-event": "NONE"}
    assert source.look() is None
    metadata.answers[f"{instance}/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.look() is None, "it lives on"
    metadata.answers[f"{instance}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert source.look() == Notice(cause="Google Cloud: the host's maintenance ends the instance")
    metadata.answers[f"{instance}/preempted"] = "TRUE"
    notice = source.look()
    assert notice is not None
    assert notice.deadline is not None
    assert 20 < notice.deadline - time.time() <= 30


def test_azure_tells_of_this_machine_and_of_others(metadata: Metadata) -> None:
    metadata.wanted = ("Metadata", "true")
    metadata.answers["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "Node_7"
    events = "/metadata/scheduledevents?api-version=2020-07-01"
    metadata.answers[events] = '{"DocumentIncarnation": 1, "Events": []}'
    source = Azure(metadata.url)
    assert source.look() is None

    def event(kind: str, machine: str) -> str:
        return (
            f'{{"Events": [{{"EventId": "e", "EventType": "{kind}", "Resources": ["{machine}"], '
            '"EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2033 18:29:47 GMT"}]}'
        )

    for kind, machine in (("Preempt", "node_8"), ("Freeze", "node_7")):
        metadata.answers[events] = event(kind, machine)
        assert source.look() is None, (kind, machine)
    metadata.answers[events] = event("Preempt", "node_7")
    deadline = datetime(2033, 9, 19, 18, 29, 47, tzinfo=timezone.utc).timestamp()
    assert source.look() == Notice(cause="Azure: scheduled event Preempt", deadline=deadline)


@pytest.mark.parametrize("cloud", [Aws, Gcp, Azure])
def test_what_is_no_answer_is_no_notice(cloud: Callable[[str], Aws | Gcp | Azure], metadata: Metadata) -> None:
    for path in (
        "/latest/meta-data/spot/instance-action", "/computeMetadata/v1/instance/preempted",
        "/metadata/scheduledevents?api-version=2020-07-01",
    ):  # fmt: skip
        metadata.answers[path] = "[<html>"
    notice = cloud(metadata.url).look()
    # EC2 has this path only where the instance is to go.
    assert notice == (Notice(cause="AWS: the spot instance is to interrupt") if cloud is Aws else None)
    metadata.wanted = ("Never", "right")
    with pytest.raises(OSError):
        cloud(metadata.url).look()


def test_a_file_says_when(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "NOTICE"
    source = NoticeFile(file)
    assert source.look() is None
    file.touch()
    os.utime(file, (1000, 1000))
    assert source.look() == Notice(cause=f"the file {file}")
    for text, deadline in (("90\n", 1090.0), ("2030-01-01T00:00:00Z", 1893456000.0), ("soon", None)):
        file.write_text(text)
        os.utime(file, (1000, 1000))
        assert source.look() == Notice(cause=f"the file {file}", deadline=deadline)


def test_the_machine_tells_which_cloud_it_is(tmp_path: pathlib.Path) -> None:
    vendor = tmp_path / "sys_vendor"
    assert source_of("auto", "", vendor=vendor) is None, "no firmware: nothing is asked"
    for text, kind in (("Amazon EC2\n", Aws), ("Google\n", Gcp), ("Microsoft Corporation\n", Azure)):
        vendor.write_text(text)
        assert type(source_of("auto", "", vendor=vendor)) is kind
        assert source_of("off", "", vendor=vendor) is None
    vendor.write_text("QEMU\n")
    assert source_of("auto", "", vendor=vendor) is None
    assert [type(source_of(cloud, "", vendor=vendor)) for cloud in CLOUDS] == [Aws, Gcp, Azure]
    assert isinstance(source_of("file", str(tmp_path / "x"), vendor=vendor), NoticeFile)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGPU_NOTICES", raising=False)
    assert settings.notices() == ("auto", "")
    for text, told in (
        ("aws@http://127.0.0.1:9", ("aws", "http://127.0.0.1:9")), ("file@/x", ("file", "/x")), ("off", ("off", "")),
    ):  # fmt: skip
        monkeypatch.setenv("SGPU_NOTICES", text)
        assert settings.notices() == told
    for text in ("maybe", "file", "file@x", "aws@nowhere", "off@x"):
        monkeypatch.setenv("SGPU_NOTICES", text)
        with pytest.raises(InputError, match="SGPU_NOTICES"):
            settings.notices()


class Scripted:
    """Answers in turn; the last one stays."""

    every_seconds = 0.001

    def __init__(self, *answers: Notice | OSError | None) -> None:
        self._answers, self.asked = list(answers), 0

    def look(self) -> Notice | None:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_service_that_fails_for_a_while_is_asked_again() -> None:
    notice = Notice(cause="x")
    watch = Watch(Scripted(None, OSError("down"), OSError("down"), OSError("down"), OSError("down"), notice))
    watch.start()
    _until(lambda: watch.notice is not None)
    watch.close()
    assert watch.notice == notice


def test_a_service_that_is_not_there_is_asked_three_times() -> None:
    source = Scripted(OSError("no route"))
    watch = Watch(source)
    watch.start()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    assert (watch.notice, source.asked) == (None, 3)


def test_signals_and_notices_are_one_thing() -> None:
    before = {number: signal.getsignal(number) for number in (1, 2, signal.SIGTERM, signal.SIGUSR1)}
    try:
        source = Scripted(None)
        watch = Watch(source)
        preemption = Preemption(watch)
        assert preemption() is None
        watch.notice = Notice(cause="AWS", deadline=5.0)
        assert preemption() == Notice(cause="AWS", deadline=5.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        _until(lambda: preemption() != watch.notice)
        assert preemption() == Notice(cause="SIGUSR1"), "the first signal"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_time_that_is_left() -> None:
    assert grace_seconds(None, 30.0) == 30.0
    assert grace_seconds(Notice(cause="x"), 30.0) == 30.0
    assert 110 < grace_seconds(Notice(cause="x", deadline=time.time() + 120), 30.0) <= 118
    assert grace_seconds(Notice(cause="x", deadline=time.time() - 5), 30.0) == 0.0


@pytest.mark.parametrize(
    ("state", "failure", "code"),
    [
        ("SUCCEEDED", None, 0),
        ("FAILED", {"kind": "exception", "error": "failure"}, 1),
        ("FAILED", {"kind": "timeout", "error": "failure"}, 1),
        ("FAILED", {"kind": "signal", "error": "crash_loop"}, 3),
        ("FAILED", {"kind": "infrastructure", "error": "failure"}, 69),
        ("FAILED", {"kind": "infrastructure", "error": "crash_loop"}, 69),
        ("FAILED", None, 1),
        ("CANCELLED", None, 2),
        ("PREEMPTED", None, 75),
        ("LOST", None, 69),
    ],
)
def test_each_end_has_an_exit_status(state: State, failure: dict[str, str] | None, code: int) -> None:
    found = exit_code(Status(state=state, updated=0.0, failure=failure))
    assert found == code
    assert found.goes_on == (code in (69, 75))
    assert found in set(ExitCode)
