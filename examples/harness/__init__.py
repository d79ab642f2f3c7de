"""What examples, benchmarks and tests run on: a service of their own, machines with empty caches, times and tables."""
