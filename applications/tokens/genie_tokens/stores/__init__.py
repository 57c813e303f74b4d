"""Where tokens are kept: in the memory of a process, in SQLite, in PostgreSQL."""
