"""Training examples that run in one process, under torchrun and as jobs of the service."""
