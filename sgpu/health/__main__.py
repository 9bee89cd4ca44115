"""`python -m sgpu.health LEVEL SECONDS CONTEXT`: the helper process. Prints a JSON object a finding."""

from __future__ import annotations

import json
import sys
from typing import cast

from sgpu.health.checks import Level, probes
from sgpu.health.isolation import run_all
from sgpu.health.probe import Context


def main(level: str, seconds: str, context: str) -> None:
    ctx = Context.from_dict(json.loads(context))
    for finding in run_all(probes(cast(Level, level), ctx), ctx, float(seconds)):
        print(json.dumps(finding.to_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
