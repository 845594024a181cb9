"""The options that a float64 reference takes, outside of a whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import yaml

from forge.config import Config, conf_dir, option_of


def plain_options(chosen: dict[str, str]) -> dict[str, Any]:
    """group -> forge's option of that name, with the settings of its own file."""
    hints = get_type_hints(Config)
    files = {group: Path(conf_dir()) / group / f"{name}.yaml" for group, name in chosen.items()}
    return {group: option_of(group, hints[group], yaml.safe_load(file.read_text())) for group, file in files.items()}
