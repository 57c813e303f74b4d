"""Adapters between the kit and Genie's clients for Python. Each is a program: `python -m conformance.adapters.thread_client`."""
