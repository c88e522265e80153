"""With this folder on its path and ``POSTTRAIN_NOISE`` set, a Python moves its kernels as soon as torch is imported."""

import importlib.abc
import importlib.machinery
import os
import sys


class _Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torch as usual, and then moves its kernels by the seed."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None:
            self.loader = found.loader
            found.loader = self
        return found

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        from moved_kernels import install

        install(int(os.environ["POSTTRAIN_NOISE"]))


if os.environ.get("POSTTRAIN_NOISE"):
    sys.meta_path.insert(0, _Torch())
