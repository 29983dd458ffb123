"""Runs whose processes have a module of the package changed, as a mistake in it would change it."""

import os

_CODE = """
import importlib.abc
import importlib.util
import sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            exec({code!r}, {{"module": module}})

        spec.loader.exec_module = loaded
        return spec

sys.meta_path.insert(0, Finder())
"""


def patched(place, module, code):
    """The variables of a run that executes `code`, with the `module` at hand, wherever that is loaded."""
    folder = place.folder / "patched"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CODE.format(module=module, code=code))  # Python runs it as it begins
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
