"""Hides PyTorch from the processes that Ray starts: the requirements don't have it."""

import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
