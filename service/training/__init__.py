"""Training jobs: taken in, kept in Redis, compiled, and driven by one gateway at a time."""
