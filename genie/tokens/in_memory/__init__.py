"""Choosing tokens in the memory of one process, which has them to itself."""

from genie.tokens.in_memory.selector import InMemorySelector

__all__ = ["InMemorySelector"]
