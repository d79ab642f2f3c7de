"""Choose an operator's implementation instead of Inductor (AlgorithmSelectorCache); candidates are rendered from their
templates only when they may be chosen."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...tuning import records
from ...tuning.tile_config import TileConfig, parse_tile_config
from ..patching import patched
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


# --- candidates that are not rendered yet --------------------------------------------------------------------


def deferring_cpp_templates(append: Callable[..., Any]) -> Callable[..., Any]:
    """torch._inductor.codegen.common.KernelTemplate.maybe_append_choice, that renders no C++ template yet."""
    from torch._inductor.codegen.cpp_template import CppTemplate

    @functools.wraps(append)
    def maybe_append_choice(self: Any, choices: list[Any], **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "_wrapped", self), CppTemplate):
            return append(self, choices, **kwargs)
        choices.append(DeferredCandidate(lambda: self.generate(**kwargs)))
        return None

    return maybe_append_choice


@functools.cache
def deferring_choices_handler() -> Any:
    """A choices handler (torch._inductor.choices.InductorChoices) whose templates' candidates are Unrendered."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.select_algorithm import ExternKernelChoice

    class PuttingOff(InductorChoices):
        def _finalize_template_configs(
            self,
            template_choices: Any,
            kernel_inputs: Any,
            templates: Any,
            op_name: str,
            kwarg_overrides: Any = None,
        ) -> list[Any]:
            made = super()._finalize_template_configs(
                template_choices, kernel_inputs, templates, op_name, kwarg_overrides
            )

            def others(template: Any, configurations: Sequence[TileConfig]) -> list[Any]:
                return _with_configurations(
                    configurations,
                    lambda: self.get_ktc(
                        kernel_inputs, template, op_name, (kwarg_overrides or {}).get(template.uid, {})
                    ),
                    (template.uid, kernel_inputs.device_type, op_name),
                )

            return [
                choice
                if isinstance(choice.template, ExternKernelChoice)
                else DeferredTemplate(choice, others)
                for choice in made
            ]

    return PuttingOff()


class DeferredCandidate:
    """Stands in for a C++ template's candidate, which takes Jinja as long as the rest of lowering its operator."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._rendered: list[Any] = []

    def may_be(self, text: str) -> bool:
        return not text.startswith(("aten ", "triton_"))

    def rendered(self) -> Any:
        """None: the template cannot do this after all."""
        if not self._rendered:
            try:
                self._rendered = [self._make()]
            except NotImplementedError:
                self._rendered = [None]
        return self._rendered[0]


class DeferredTemplate(DeferredCandidate):
    """A torch._inductor.kernel_template_choice.KernelTemplateChoice that stands in for its own candidate."""

    def __init__(
        self, template_choice: Any, others: Callable[[Any, Sequence[TileConfig]], list[Any]]
    ) -> None:
        super().__init__(lambda: template_choice.choice)
        self.template_choice = template_choice
        self._others = others
        self.template = template_choice.template
        self.inputs = template_choice.inputs

    @property
    def choice(self) -> DeferredTemplate:
        return self

    @property
    def layout(self) -> Any:
        return self.template_choice.layout

    @layout.setter
    def layout(self, layout: Any) -> None:
        self.template_choice.layout = layout

    def may_be(self, text: str) -> bool:
        """Whether this could be the candidate: all that its text says of what it is made with is so."""
        if not re.match(rf"triton_{re.escape(self.template.name)} ", text):
            return False
        told = dict(re.findall(r"\b([A-Za-z_]+)=([^,]+)", text))
        parameters = self.template_choice.params.to_kwargs()
        return all(repr(value) == told[name] for name, value in parameters.items() if name in told)

    def others(self, configurations: Sequence[TileConfig]) -> list[DeferredTemplate]:
        """The same template in other configurations."""
        found = self._others(self.template, [c for c in configurations if c.template == self.template.name])
        for template_choice in found:
            template_choice.layout = self.layout
        return [DeferredTemplate(template_choice, self._others) for template_choice in found]


def render_candidate(choice: Any) -> Any:
    return choice.rendered() if isinstance(choice, DeferredCandidate) else choice


def _with_configurations(
    configurations: Sequence[TileConfig], make: Callable[[], Iterable[Any]], heuristic_key: tuple[str, ...]
) -> list[Any]:
    """What `make` gives when a template's heuristic (BaseConfigHeuristic.mm_configs) has these configurations."""
    from torch._inductor.template_heuristics.registry import get_template_heuristic
    from torch._inductor.template_heuristics.triton import GemmConfig

    heuristic: Any = get_template_heuristic(*heuristic_key)
    if not configurations or not all(type(c) is GemmConfig for c in getattr(heuristic, "mm_configs", [None])):
        return []
    wanted = [
        GemmConfig(c.block_m, c.block_n, c.block_k, c.stages, c.warps, group_m=c.group_m)
        for c in configurations
    ]
    with patched(heuristic, "mm_configs", wanted), patched(heuristic, "should_scale_configs", False):
        return list(make())
