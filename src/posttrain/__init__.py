"""posttrain: the laboratory for language-model post-training.

The functions of ``posttrain.api`` are names of this package, and are imported when they are first used.
"""

from importlib import import_module

__version__ = "0.2.0"

# The public names, by the module that defines them (``__init__.pyi`` has their types).
_PUBLIC = {
    "train": "training",
    "sweep": "sweep",
    "evaluate": "measure",
    "generate": "measure",
    "load_run": "run",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    return getattr(import_module(f"posttrain.api.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
