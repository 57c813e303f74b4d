"""A whole deployment in one process, with a virtual clock: servers, Redis, clients, faults, and checkers of what they do."""
