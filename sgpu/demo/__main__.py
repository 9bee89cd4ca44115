"""`python -m sgpu.demo`."""

from __future__ import annotations

import sys

from sgpu.demo.show import main

if __name__ == "__main__":
    sys.exit(main())
