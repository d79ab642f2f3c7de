"""Training jobs on the cluster: captured, placed by Ray Train, kept alive, and their events told."""
