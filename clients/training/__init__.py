"""What runs inside a training job: the runner of each rank, the capture run, and what a script may import."""
