"""For all tests."""

import signal

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # how long an example takes says nothing about what is right
settings.load_profile("patient")

# A shell lets what it starts in the background ignore Ctrl-C, and so would every process that a test starts and ends by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
