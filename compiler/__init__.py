VERSION = "0.1.0"
"""Of torchrelay, as in pyproject.toml. A copy on PYTHONPATH has no other place for it."""
