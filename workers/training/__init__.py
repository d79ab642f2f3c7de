"""Training jobs on the cluster: capture runs, ranks placed by Ray Train, restarts, and the events of a job."""
