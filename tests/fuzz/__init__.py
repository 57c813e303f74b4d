"""Fuzzers: bytes against the protocol's readers (`codec`), and a grammar of lines against a whole server (`server`).

`PYTHONPATH=tests python -m fuzz.codec --help`. `make fuzz` runs both; docs/concepts/verification.md tells what they look at.
"""
