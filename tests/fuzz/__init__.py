"""Fuzzers: bytes for the parsers (`codec`), lines for a server without sockets (`server`) and for a real one (`wire`).

`make fuzz` runs them all, `PYTHONPATH=tests python -m fuzz.codec --help` one of them. docs/concepts/verification.md describes
what they check.
"""
