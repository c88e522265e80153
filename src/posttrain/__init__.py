"""posttrain: a laboratory for language-model post-training.

Functions from ``posttrain.api`` are exported here, imported lazily on first use. Verified parts (``losses``,
``advantages``, ``aggregations``, ``grade``, ``statistics``) need no run, and at most torch.
"""

from importlib import import_module

__version__ = "0.2.0"

# The public names, by the module that defines them (``__init__.pyi`` has their types).
_PUBLIC = {
    "train": "training",
    "sweep": "sweep",
    "what_if": "what_if",
    "load_what_if": "what_if",
    "diagnose": "diagnose",
    "evaluate": "measure",
    "generate": "measure",
    "load_run": "run",
    "Trainer": "trainer",
    "losses": "parts.losses",
    "advantages": "parts.advantages",
    "aggregations": "parts.aggregations",
    "grade": "parts.grading",
    "pass_at_k": "parts.statistics",
    "statistics": "parts.statistics",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    module = import_module(f"posttrain.api.{_PUBLIC[name]}")
    if _PUBLIC[name].endswith(f".{name}"):  # a group of functions, which is the module
        return module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
