"""Token selection in the memory of one process that has its wallets to itself."""

from genie_tokens.in_memory.selector import InMemorySelector

__all__ = ["InMemorySelector"]
