"""Genie and Redis as processes of their own, and their ports, terminals and signals."""
