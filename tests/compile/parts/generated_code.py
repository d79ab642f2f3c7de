"""What this process' own Inductor generates for a program, beside the keys of the program's graphs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torchrelay.compiler.errors import RelayError
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import key
from torchrelay.compiler.torch_internals.inductor import config
from torchrelay.compiler.torch_internals.inductor.compiled_graphs import copy_graph
from torchrelay.compiler.torch_internals.inductor.dry_run import generated_source


class Seen(Struct, frozen=True):
    """A program as the service and as Inductor see it, one item for each graph that Dynamo makes of it.

    keys: 64 hex digits, or the code and message of a refusal. code: what Inductor generates, forward and backward; ''
    where it was not asked.
    """

    keys: tuple[str, ...]
    code: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return any(len(item) != 64 for item in self.keys)


def see(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = None,
    mode: str = "default",
    options: Mapping[str, Any] | None = None,
    code: Callable[[str], bool] = lambda key: True,
) -> Seen:
    """Trace a program with Dynamo, and run its graphs without Inductor. code: whether to generate a graph's code, by
    its key or refusal."""
    keys: list[str] = []
    generated: list[str] = []
    chosen = dict(options or {})

    def backend(gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        try:
            request = capture(gm, example, mode=mode, options=chosen).request  # type: ignore[arg-type]
            keys.append(key.key_of(request))
        except RelayError as error:
            keys.append(f"{error.code}: {error}")
        eager = copy_graph(gm)
        patches = {**config.mode_options(mode, dynamic), **chosen}
        source = ""
        if code(keys[-1]):
            # What cannot be sent need not compile either.
            with contextlib.nullcontext() if len(keys[-1]) == 64 else contextlib.suppress(Exception):
                source = without_comments(generated_source(gm, example, patches))
        generated.append(source)
        return eager.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=dynamic)(*inputs)
    return Seen(tuple(keys), tuple(generated))


def without_comments(source: str) -> str:
    """Generated code without its comments, which name nodes, files and the numbers of graphs."""
    return "\n".join(line for line in source.splitlines() if not re.match(r"\s*(# |//)", line))
