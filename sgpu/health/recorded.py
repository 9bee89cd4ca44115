"""GPUs from a file: what a machine once said, or a script of what it might say."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from sgpu.health.gpu import GpuFigures, SourceError
from sgpu.health.probe import Context


class RecordedGpus:
    """Reads `{"gpus": [{"index": 0, "uncorrectable": 0, ...}], "hang_seconds": 0}` from `ctx.recorded`.

    A list of such objects is a script: the first is taken off the file at each look, the last one stays.
    """

    def read(self, ctx: Context) -> Sequence[GpuFigures]:
        path = pathlib.Path(ctx.recorded or "")
        try:
            said = json.loads(path.read_text())
            told = _next(path, said) if isinstance(said, list) else said
            time.sleep(float(told.get("hang_seconds", 0)))  # a wedged driver
            return [GpuFigures(**figures) for figures in told["gpus"]]
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise SourceError(f"the recording {path} cannot be read: {error!r}") from error


def _next(path: pathlib.Path, script: list[Any]) -> Any:
    if len(script) > 1:
        path.write_text(json.dumps(script[1:]))
    return script[0]
