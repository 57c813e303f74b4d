"""The version of the package."""

from __future__ import annotations

from typing import Final

VERSION: Final = "1.0.0rc1"
"""The one place of the version: the build of the package reads it here."""
