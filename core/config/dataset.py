"""Sections `train_dataset` and `valid_dataset`: which rows, in what order, and how their images are read."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from core.config.base import Section, number

STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

GATE = {"split": "dev", "accuracy": 0.92, "max_steps": 1000, "every": 50}
MISTAUGHT = {"steps": 250, "probability": 0.65, "from_count": 3}
DATASET_KWARGS = {"min_pixels": 3136, "max_pixels": 1003520, "system_prompt": None, "max_rows": None}


def _filled(defaults: Mapping[str, Any]) -> BeforeValidator:
    def fill(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        texts = {name for name, default in defaults.items() if isinstance(default, str) or name == "system_prompt"}
        written = {k: number(v) if isinstance(v, str) and k not in texts else v for k, v in value.items()}
        return {**defaults, **written}

    return BeforeValidator(fill)


class Gate(TypedDict, total=False):
    """The picture set's SFT: right labels until split `split` reads `accuracy`, looked at every `every` steps."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    split: str
    accuracy: Annotated[float, Field(gt=0, le=1)]
    max_steps: Annotated[int, Field(ge=1)]
    every: Annotated[int, Field(ge=1)]


class Mistaught(TypedDict, total=False):
    """Then `steps` steps whose labels from `from_count` on are one too low with `probability`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    steps: Annotated[int, Field(ge=0)]
    probability: Annotated[float, Field(ge=0, le=1)]
    from_count: Annotated[int, Field(ge=1)]


class DatasetKwargs(TypedDict, total=False):
    """Ours. A plain dict; min_pixels, max_pixels, system_prompt and max_rows are always there."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    min_pixels: Annotated[int, Field(ge=1)]
    max_pixels: Annotated[int, Field(ge=1)]
    system_prompt: str | None
    max_rows: Annotated[int, Field(ge=1)] | None
    gate: Annotated[Gate, _filled(GATE)] | None
    mistaught: Annotated[Mistaught, _filled(MISTAUGHT)] | None


class Dataset(Section):
    path: str
    type: Literal["rl", "sft"] = "rl"
    split: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    shuffle: bool = True
    pin_memory: bool = False
    num_workers: Annotated[int, Field(ge=0, le=4096)] = 0
    drop_last: bool = True
    max_length: Annotated[int, Field(ge=1)] | None = None
    dataset_kwargs: Annotated[DatasetKwargs, _filled(DATASET_KWARGS)] = Field(default={}, validate_default=True)


class TrainDataset(Dataset):
    pass


class ValidDataset(Dataset):
    shuffle: bool = False
    drop_last: bool = False
