"""The parts of `benchmarks/scale.py`: each yields its rows, and its docstring begins with what it does."""
