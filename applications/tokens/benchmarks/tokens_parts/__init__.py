"""The parts of `tokens.py`."""
