"""Stores under test, what is stored in Redis, and a Redis whose replies the test decides."""
