"""Choose an operator's implementation instead of Inductor (AlgorithmSelectorCache)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...tuning import records
from ...tuning.tile_config import parse_tile_config
from ..patching import patched
from .deferred_templates import (
    DeferredCandidate,
    DeferredTemplate,
    deferring_choices_handler,
    deferring_cpp_templates,
    render_candidate,
)
from .operator_candidates import DESCRIBED_BY_OPERANDS, OperatorCandidates, candidate_text

ExpectedCandidate = Callable[[records.Problem, str], str | None]
"""Asked for a problem on a device before templates are rendered, which takes 5 to 20 ms each: the text of the candidate
that will be taken; ATEN: PyTorch's own kernel; None: not known, render all."""

ATEN = "aten"


@contextlib.contextmanager
def choosing_algorithms(
    choose: Callable[[OperatorCandidates], int],
    *,
    least: int = 2,
    expected_candidate: ExpectedCandidate | None = None,
) -> Iterator[None]:
    """Inside the block, `choose` says which candidate implements an operator; Inductor measures none. least: so many
    candidates make a choice. With `expected_candidate`, only candidates that may be taken are rendered.

    Wraps torch._inductor.select_algorithm.AlgorithmSelectorCache.__call__, which takes a single choice as it is and
    puts off nothing (no MultiTemplateBuffer): what a choice was made for does not show in the code. Left to Inductor:
    operators that all ranks must measure together, CUTLASS (it finds out its workspace while it measures), and whatever
    is to be decided otherwise than by time.
    """
    from torch._inductor import config
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.select_algorithm import AlgorithmSelectorCache
    from torch._inductor.virtualized import V

    original = AlgorithmSelectorCache.__call__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        ours = not config.deterministic and not _left_to_inductor(bound)
        problem = None
        if expected_candidate is not None and ours:
            bound["choices"], problem = _permitted_candidates(self, bound, expected_candidate)
        bound["choices"] = [
            choice for made in bound["choices"] if (choice := render_candidate(made)) is not None
        ]
        for preprocess in self.preprocessing_fns:
            bound["choices"] = preprocess(bound["choices"])
        if len(bound["choices"]) >= least and ours:
            bound["choices"] = [bound["choices"][choose(OperatorCandidates(self, bound, problem))]]
        del bound["self"]
        return original(self, **bound)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(AlgorithmSelectorCache, "__call__", call))
        if expected_candidate is not None:
            stack.enter_context(V.set_choices_handler(deferring_choices_handler()))
            append = deferring_cpp_templates(KernelTemplate.maybe_append_choice)
            stack.enter_context(patched(KernelTemplate, "maybe_append_choice", append))
        yield


def _permitted_candidates(
    cache: Any, bound: Mapping[str, Any], expected_candidate: ExpectedCandidate
) -> tuple[list[Any], records.Problem | None]:
    """An operator's candidates without those that will not be taken; and the problem, if it is known before any is
    rendered. Rendering a template fixes its operands' strides, often to others."""
    choices = list(bound["choices"])
    templates = [choice for choice in choices if isinstance(choice, DeferredCandidate)]
    ready = [choice for choice in choices if not isinstance(choice, DeferredCandidate)]
    if not templates or bound["name"] not in DESCRIBED_BY_OPERANDS or bound.get("input_gen_fns"):
        return choices, None
    selection = OperatorCandidates(cache, {**bound, "choices": ready})
    if not selection.aten:
        return choices, None
    expected = expected_candidate(selection.problem, selection.device)
    if expected is None:
        return choices, selection.problem
    if expected == ATEN or expected in selection.candidates:
        return ready, selection.problem
    configuration = parse_tile_config(expected)
    offered = [template for template in templates if template.may_be(expected)]
    if not offered and configuration is not None:
        tunable = [template for template in templates if isinstance(template, DeferredTemplate)]
        first = {template.template.uid: template for template in tunable}
        offered = [other for template in first.values() for other in template.others([configuration])]
    for template in offered:
        rendered = render_candidate(template)
        if rendered is not None and candidate_text(rendered) == expected:
            return [*ready, template], selection.problem
    return choices, selection.problem


def _left_to_inductor(bound: Mapping[str, Any]) -> bool:
    from torch._inductor import ir

    return (
        bool(bound.get("is_collective"))
        or bound.get("best_config_future") is not None
        or bound.get("min_speedup_threshold", 1.0) != 1.0
        or bool(bound.get("benchmark_with_cudagraphs"))
        or not isinstance(bound["layout"], ir.Layout)
        or bound["layout"].device.type not in ("cpu", "cuda")
        or any(
            type(choice).__name__.startswith("CUTLASS") or getattr(choice, "hint_override", None) is not None
            for choice in bound["choices"]
        )
    )
