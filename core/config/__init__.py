"""The configuration: one YAML file and overrides into a frozen Config, torch-free."""

from core.config.built import not_built
from core.config.errors import ConfigError, UserError
from core.config.experiment import Config
from core.config.loading import load, load_text

__all__ = ["Config", "ConfigError", "UserError", "load", "load_text", "not_built"]
