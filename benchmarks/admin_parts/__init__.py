"""The parts of `admin.py`."""
