"""What a rank's process is told: its environment variables, and the exit code of one that stopped when asked."""

from __future__ import annotations

ANSWER_ENVIRONMENT = "TORCHRELAY_TRAIN_CHANNEL"
"""Number of the file descriptor on which a rank tells its worker RankMessages, one JSON text a line."""


SPEC_ENVIRONMENT = "TORCHRELAY_TRAIN_SPEC"
"""The job's TrainSpec as JSON, for ranks and for the capture run."""


JOB_ENVIRONMENT = "TORCHRELAY_TRAIN_JOB"
"""The job's id, for ranks."""


CHECKPOINTS_ENVIRONMENT = "TORCHRELAY_TRAIN_CHECKPOINTS"
"""Where a rank's checkpoints go: the spec's place, or a folder of the job's own."""


CAPTURE_ENVIRONMENT = "TORCHRELAY_TRAIN_CAPTURE"
"""1: this is the capture run; no checkpoint is read or written, and nothing is told."""


STOPPED_CODE = 143
"""A rank's exit code when its script ended because `train.should_stop()` told it to (SIGTERM): it is not done."""
