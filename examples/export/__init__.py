"""Models to export."""
