"""Locate the package's components by scanning source text, without importing.

An unindented function decorated by ``@register("reward")`` is a reward, in any module. The first lookup scans every
source file, once per process (10 ms).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent
# Matches a decorator until the next decorator, plus the decorated definition.
_REGISTERED = re.compile(r'^@register\(\s*"(\w+)"(.*?)(?:^@.*?)?^(?:def|class) (\w+)', re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r'\bname="([^"]+)"')


def registered_in(source: str) -> list[tuple[str, str]]:
    """Find kind and name for each registered component, in source order."""
    found = []
    for kind, arguments, name in _REGISTERED.findall(source):
        named = _NAMED.search(arguments)
        if named is not None:
            name = named[1]
        found.append((kind, name))
    return found


class ComponentModules(Mapping[str, Mapping[str, str]]):
    """Map kind, then name, to the defining module, in source order."""

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
