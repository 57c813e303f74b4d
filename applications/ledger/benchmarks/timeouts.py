"""How fast the timeout handler reads a ledger of 1,000,000 transfers with 3.5 million state changes.

    PYTHONPATH=benchmarks:tests python applications/ledger/benchmarks/timeouts.py [PART ...] [--json]

It starts MariaDB and PostgreSQL, with durable commits and enough memory for this ledger. The table shows each measurement,
its goal, and whether it is met; see `scale.py`. Times are medians, and need a quiet machine.
"""

from __future__ import annotations

import sys

from scale_parts.table import run
from timeouts_parts.moved import moved_in_mariadb, moved_in_postgres, moved_in_sqlite
from timeouts_parts.parts import mariadb, postgres, sqlite

if __name__ == "__main__":
    parts = (mariadb, postgres, sqlite, moved_in_mariadb, moved_in_postgres, moved_in_sqlite)
    sys.exit(run("How fast expired transfers are found.", *parts))
