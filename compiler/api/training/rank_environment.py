"""A rank's environment variables, and the exit code of a rank that was asked to stop."""

from __future__ import annotations

ANSWER_ENVIRONMENT = "TORCHRELAY_TRAIN_CHANNEL"
"""Number of the file descriptor to which a rank writes RankMessages, one JSON text per line."""

SPEC_ENVIRONMENT = "TORCHRELAY_TRAIN_SPEC"
"""The job's TrainSpec as JSON, for ranks and for the capture run."""

JOB_ENVIRONMENT = "TORCHRELAY_TRAIN_JOB"
"""The job's id, for ranks."""

CHECKPOINTS_ENVIRONMENT = "TORCHRELAY_TRAIN_CHECKPOINTS"
"""Where a rank's checkpoints go: the spec's folder or URL, or a folder of the job."""

CAPTURE_ENVIRONMENT = "TORCHRELAY_TRAIN_CAPTURE"
"""1: this is the capture run, which reads and writes no checkpoint and reports nothing."""

STOPPED_CODE = 143
"""A rank's exit code if its script ended because `train.should_stop()` was true (SIGTERM): it is not done."""
