"""Parts of `benchmarks/fairness.py`."""
