"""Single options, outside a whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import yaml

from forge.config import Config, _part, conf_dir
from forge.errors import ConfigError


def option(group: str, protocol: type, values: Any, allowed: tuple[str, ...] = ()) -> Any:
    """The dataclass that `_target_` in the values names. Raises ConfigError, as a whole configuration does."""
    mistakes: list[str] = []
    made = _part(group, group, protocol, values, allowed, mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return made


def plain_options(chosen: dict[str, str]) -> dict[str, Any]:
    """group -> forge's option of that name, with the settings of its own file."""
    hints = get_type_hints(Config)
    return {group: option(group, hints[group], yaml.safe_load((Path(conf_dir()) / group / f"{name}.yaml").read_text()))
            for group, name in chosen.items()}
