"""What a run of the tests reports and searches for."""
