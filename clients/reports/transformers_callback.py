"""What torchrelay did, in the log of a Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl

from .run_report import ReportValues


class TransformersCallback(TrainerCallback):
    """Logs hits, misses, fallbacks and seconds after each step or evaluation that compiled something.

        trainer.add_callback(TransformersCallback(trainer))

    They go through `Trainer.log`, so that whatever `report_to` names gets them: wandb, TensorBoard, MLflow.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._values = ReportValues()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._log(control)

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._log(control)

    def _log(self, control: TrainerControl) -> None:
        if values := self._values.changed():
            should_log = control.should_log
            self._trainer.log(values)
            control.should_log = should_log  # `log` takes back that the step's own values are due
