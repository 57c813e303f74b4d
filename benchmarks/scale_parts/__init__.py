"""The parts of `benchmarks/scale.py`. Each yields rows of the table; the first line of its
docstring is its title.
"""
