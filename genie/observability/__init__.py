"""What operators see. The core knows none of it."""
