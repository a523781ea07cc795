"""Models, found by name: ``model.name`` without a dot is a package here, with a dot any import path."""

from __future__ import annotations

import importlib
import pkgutil

from ..config import Config
from ..trainer.adapter import ModelAdapter


def build(config: Config) -> ModelAdapter:
    """Import the model package that ``model.name`` names and let it build its adapter.

    Raises ValueError with the known names if there is no such package, or if it has no ``build``.
    """
    name = config.model.name
    module_name = name if "." in name else f"{__name__}.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the package exists; something that it imports does not
        known = ", ".join(module.name for module in pkgutil.iter_modules(__path__))
        raise ValueError(f"model.name = {name}: no module {module_name}; models here: {known}") from None
    if not hasattr(module, "build"):
        raise ValueError(f"model.name = {name}: {module_name} has no function build(config)")
    return module.build(config)
