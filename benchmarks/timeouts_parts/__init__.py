"""What `timeouts.py` measures."""
