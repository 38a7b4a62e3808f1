"""Sections `gconfig` and `eval_gconfig`: how answers are sampled."""

from typing import Annotated, ClassVar

from pydantic import Field

from core.config.base import Foreign, NotBuilt, Section


class Generation(Section):
    n_samples: Annotated[int, Field(ge=1, le=65_536)] = 1
    max_new_tokens: Annotated[int, Field(ge=1)] = 16384
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1)] = 32768
    greedy: bool = False
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = 100_000_000
    temperature: Annotated[float, Field(ge=0)] = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: tuple[str, ...] | None = None
    frequency_penalty: float = 0.0
    use_beam_search: Annotated[bool, NotBuilt()] = False

    foreign: ClassVar[dict[str, Foreign]] = {"lora_name": Foreign("default_lora")}
