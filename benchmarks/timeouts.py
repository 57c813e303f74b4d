"""How fast the timeout handler goes through a ledger of 1,000,000 transfers with 3.5 million state changes.

    python benchmarks/timeouts.py [PART ...] [--json]

It starts MariaDB and PostgreSQL by itself, with the disk waited for and with memory for such a ledger. The table says what
was measured, the goal, and whether it is met; see `scale.py`. Times are medians and want a quiet machine.
"""

from __future__ import annotations

import sys

from scale_parts.table import run
from timeouts_parts.moved import moved_in_mariadb, moved_in_postgres, moved_in_sqlite
from timeouts_parts.parts import mariadb, postgres, sqlite

if __name__ == "__main__":
    parts = (mariadb, postgres, sqlite, moved_in_mariadb, moved_in_postgres, moved_in_sqlite)
    sys.exit(run("How fast expired transfers are found.", *parts))
