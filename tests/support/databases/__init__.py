"""Real database servers, and tables with fences."""
