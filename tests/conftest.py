"""For all tests."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # how long an example takes says nothing about what is right
settings.load_profile("patient")
