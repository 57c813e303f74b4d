"""The parts of `timeouts.py`."""
