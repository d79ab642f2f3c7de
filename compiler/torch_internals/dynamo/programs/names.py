"""Names of the global variables that Dynamo makes for its bytecode."""

from __future__ import annotations

GRAPH = "__compiled_fn"
RESUME = "__resume_at"
BUILTINS = "__builtins_dict__"
VALUE = "__program_value"
ALIAS = "__import_"
"""Of a module; as long as the module is imported, all frames share it."""
