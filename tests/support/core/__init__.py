"""Lock managers and pipelines that run without sockets, with the time that a test chooses."""
