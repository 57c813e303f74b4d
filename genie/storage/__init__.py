"""Where the locks outlive the server: one protocol, and a store for each place."""
