"""What happens around one call of the user's function: set up, call, and what came of it."""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import traceback
from typing import Any

import cloudpickle

from sgpu.contract import payload
from sgpu.contract.errors import SgpuError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.heartbeat import Slot
from sgpu.contract.outcome import Outcome, rebuild_exception
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.training import Preempted, seed_everything, settle_left_loops
from sgpu.worker.control import Control, Restart
from sgpu.worker.cpu import allow_nccl_names, separate_async_saves

# Fails the same way each time, whatever machine it runs on. Errors of sgpu say it themselves.
_UNRECOVERABLE = (ImportError, NameError, SyntaxError, NotImplementedError)
# Of each end of an error's text.
_TOLD_CHARACTERS = 10_000
# What peers of a rank that ended see, by what torch's back-ends say (they raise plain RuntimeErrors).
_COLLATERAL = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connectfullmesh",
    "socket timeout",
    "connection refused",
    "remote process exited or there was a network error",
    "failed to recv",
    "failed to send",
    "application timeout caused pair closure",
)


def call(
    run: RunDir, spec: RunSpec, slot: Slot, rank: int, generation: int, *, control: Control | None = None
) -> Outcome | None:
    """The user's function, and what came of it; nothing that it raises gets past here. None: `control` gave it up."""
    who = {"rank": rank, "generation": generation}

    def make() -> Outcome:
        failpoint("worker.reboot" if generation else "worker.boot", rank)
        _set_up(run, spec, rank)
        called = payload.unpack(run.payload.read_bytes())
        value = called.function(*called.args, **called.kwargs)
        settle_left_loops()
        failpoint("worker.result", rank)
        content, problem = _pack_result(value)
        return Outcome(
            kind="result", step=slot.read().step, result=content, result_problem=problem, rank=rank,
            generation=generation,
        )  # fmt: skip

    try:
        return make() if control is None else control.call(make)
    except Restart:
        return None
    except Preempted as error:
        return Outcome(kind="preempted", step=slot.read().step, message=str(error), rank=rank, generation=generation)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; it is told to the user as it is
        return _exception(error, "exception", slot, **who)
    except BaseException as error:  # noqa: BLE001 - sys.exit or KeyboardInterrupt: no result, and the run must know
        return _exception(error, "exit", slot, **who)


def prepare(spec: RunSpec) -> None:
    """Once a process."""
    if spec.accelerator == "cpu":
        allow_nccl_names()
        separate_async_saves()


def _set_up(run: RunDir, spec: RunSpec, rank: int) -> None:
    folders = [str(run.code), *spec.sys_path]
    sys.path[:] = folders + [entry for entry in sys.path if entry not in folders]
    os.chdir(spec.working_dir)
    sys.argv = [spec.name]
    # Each rank draws a stream of its own, the same one after a restart.
    seed_everything(random.Random(f"{spec.seed}/{rank}").getrandbits(63))


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """GPU tensors come back as CPU tensors: the notebook may have no GPU, or need its memory."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def _pack_result(value: Any) -> tuple[bytes | None, str | None]:
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # noqa: BLE001 - user objects' reducers may raise anything
        return None, f"a {type(value).__qualname__} cannot be pickled: {type(error).__name__}: {error}"
    return buffer.getvalue(), None


class _AsItWas:
    """Pickled, it becomes the exception itself, without what cannot travel."""

    def __init__(self, error: BaseException) -> None:
        travels = {name: value for name, value in vars(error).items() if _pack_result(value)[0] is not None}
        self._parts = type(error), error.args, travels

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_exception, self._parts


def _pack_exception(error: BaseException) -> bytes | None:
    """None where it cannot be rebuilt. Pickle gives `args` to the constructor: it may make another message of them."""
    for what in (error, _AsItWas(error)):
        content, _ = _pack_result(what)
        if content is None:
            continue
        try:
            again = pickle.loads(content)
            if type(again) is type(error) and str(again) == str(error):
                return content
        except Exception:  # noqa: BLE001 - odd constructors may raise anything
            continue
    return None


def _exception(error: BaseException, kind: Any, slot: Slot, *, rank: int, generation: int) -> Outcome:
    content = _pack_exception(error)
    text = _user_traceback(error)
    print(text, file=sys.stderr, flush=True)
    message = str(error)
    return Outcome(
        kind=kind, rank=rank, generation=generation, step=slot.read().step, exception=content,
        exception_type=type(error).__qualname__, message=_cut(message), traceback=_cut(text),
        collateral=isinstance(error, (RuntimeError, OSError)) and any(mark in message.lower() for mark in _COLLATERAL),
        unrecoverable=isinstance(error, _UNRECOVERABLE) or (isinstance(error, SgpuError) and error.unrecoverable),
    )  # fmt: skip


def _cut(text: str) -> str:
    """Without the middle where it is long: status, events and the notebook carry it, and the log has it whole."""
    left_out = len(text) - 2 * _TOLD_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:_TOLD_CHARACTERS]} ... ({left_out:,} characters: see the log) ... {text[-_TOLD_CHARACTERS:]}"


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's own first frame on."""
    at = error.__traceback__
    here = os.path.dirname(__file__)
    while at is not None and at.tb_frame.f_code.co_filename.startswith(here) and at.tb_next is not None:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


def leave_group(kind: str) -> None:
    """A rank that succeeded says good-bye to its group; one that failed just goes, so that its peers notice at once."""
    distributed: Any = sys.modules.get("torch.distributed")
    if kind == "result" and distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
