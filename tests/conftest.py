"""For all tests."""

from dispositions import restore_defaults_for_children
from failures import pytest_configure
from searches import load_profile

__all__ = ["pytest_configure"]

load_profile()
restore_defaults_for_children()
