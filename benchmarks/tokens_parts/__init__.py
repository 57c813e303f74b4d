"""The parts of `tokens.py`, one subject each."""
