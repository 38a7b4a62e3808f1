"""Qwen2, Qwen2.5 and Qwen2.5-VL."""

from models.archon.qwen2.model.args import Qwen2ModelArgs
from models.archon.qwen2.model.model import Qwen2Model
from models.archon.qwen2.model.state_dict_adapter import Qwen2StateDictAdapter

__all__ = ["Qwen2Model", "Qwen2ModelArgs", "Qwen2StateDictAdapter"]
