"""The admin port: a fake one, its client, sample responses, and a browser."""
