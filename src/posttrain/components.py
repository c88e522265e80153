"""The module of each component of the package, found in the source without importing it.

A function with ``@register("reward")`` above it, at the left margin, is a reward, wherever in the package it is. All
source files are read once in a process, when the first component is looked for (10 ms).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent
# The decorator up to the next decorator, and the definition that it decorates.
_REGISTERED = re.compile(r'^@register\(\s*"(\w+)"(.*?)(?:^@.*?)?^(?:def|class) (\w+)', re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r'\bname="([^"]+)"')


def registered_in(source: str) -> list[tuple[str, str]]:
    """Return the kind and the name of each component that a source file registers, in the order of the file."""
    found = []
    for kind, arguments, name in _REGISTERED.findall(source):
        named = _NAMED.search(arguments)
        if named is not None:
            name = named[1]
        found.append((kind, name))
    return found


class ComponentModules(Mapping[str, Mapping[str, str]]):
    """The module of each component by its name, by kind; in the order of files and of what is in them."""

    @cached_property
    def _found(self) -> dict[str, dict[str, str]]:
        modules: dict[str, dict[str, str]] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            source = path.read_bytes()
            if b"\n@register(" not in source:
                continue
            module = ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts))
            for kind, name in registered_in(source.decode()):
                modules.setdefault(kind, {})[name] = module
        return modules

    def __getitem__(self, kind: str) -> Mapping[str, str]:
        return self._found[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
