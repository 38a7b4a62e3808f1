"""Which family of models serves which `model_type` of a config.json."""

from __future__ import annotations

import json
from pathlib import Path

from models.archon.base import ModelFamily
from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs, Qwen2StateDictAdapter
from models.archon.qwen2.model.args import ModelConfigError

QWEN2 = ModelFamily(Qwen2ModelArgs, Qwen2Model, Qwen2StateDictAdapter)
FAMILIES = {"qwen2": QWEN2, "qwen2_5_vl": QWEN2}


def family_of(path: str | Path) -> ModelFamily:
    """The family of a checkpoint directory. Raises ModelConfigError naming the known ones."""
    file = Path(path) / "config.json"
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise ModelConfigError(f"{file}: cannot be read: {error}") from error
    if model_type not in FAMILIES:
        raise ModelConfigError(f"{file}: model_type {model_type!r} is not built; {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]
