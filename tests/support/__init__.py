"""What tests share, by subject: processes, stores, databases, the network, the admin port, the core, and test runs."""
