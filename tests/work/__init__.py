"""The work of a server for each cycle, counted and compared with a baseline: `make baseline` writes the baseline anew."""
