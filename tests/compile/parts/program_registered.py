"""Changes of what abstract classes are told with ABC.register, which `isinstance` asks."""

from __future__ import annotations

from types import ModuleType

import pytest
from program_changes import Change, edit

CLASSES = """
import abc
from collections.abc import Mapping, MutableMapping


class A(abc.ABC):
    pass


class B(abc.ABC):
    pass


class Base:
    pass


class C(Base):
    pass


A.register(B)
box = C()
# here


def program(x):
    return x * 2 if isinstance(box, A) else x * 3
"""
OF_LIBRARY = CLASSES.replace("isinstance(box, A)", "isinstance(box, Mapping)")

_registered: list[type] = []


def _register_another(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Another class each time, of a package that the program has nothing of."""
    name = f"Registered{len(_registered)}"
    _registered.append(type(name, (), {"__module__": "another_package.parts"}))
    module.Mapping.register(_registered[-1])


REGISTERED = {
    "the class": edit(CLASSES, ("# here", "A.register(C)")),
    "its base": edit(CLASSES, ("# here", "A.register(Base)")),
    "the class with a registered one": edit(CLASSES, ("# here", "B.register(C)")),
    "a builtin class": edit(
        CLASSES.replace("isinstance(box, A)", "isinstance([1], A)"), ("# here", "A.register(list)")
    ),
    "the class with the library's subclass": edit(OF_LIBRARY, ("# here", "MutableMapping.register(C)")),
    "a class of another package": Change(text=OF_LIBRARY, patch=_register_another, how="used", differs=False),
}
