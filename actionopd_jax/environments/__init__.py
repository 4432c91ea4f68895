"""Environments, one file or folder each; `load` finds them by name and imports them only when used."""

import importlib

from actionopd_jax.errors import ConfigError
from actionopd_jax.protocols import Suite
from actionopd_jax.records import JsonObject

SUITES: dict[str, tuple[str, str]] = {
    "bfcl": ("actionopd_jax.environments.bfcl", "BfclSuite"),
    "service_desk": ("actionopd_jax.environments.service_desk", "ServiceDeskSuite"),
}
"""Name of a suite -> its module and class; the module is imported by `load` alone."""


def load(name: str, settings: JsonObject) -> Suite:
    """The suite `name`, built from its own `settings`.

    Raises:
        ConfigError: unknown name, or settings that the suite refuses.
        MissingExtraError: the suite needs a package that is not installed.
    """
    if name not in SUITES:
        raise ConfigError(f"unknown environment {name!r}; known: {', '.join(sorted(SUITES))}")
    module, attribute = SUITES[name]
    return getattr(importlib.import_module(module), attribute)(settings)
