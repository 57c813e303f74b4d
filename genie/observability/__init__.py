"""Metrics, statistics and logging. The lock manager does not depend on this package."""
