"""Candidates that are rendered from their template only when they may be chosen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...tuning.tile_config import TileConfig
from ..patching import patched


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
