"""Sections `actor`, `ref` and `critic`: the loss and its rewards on top of the training engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from core.config.base import Foreign, NotBuilt, Section
from core.config.engine import Optimizer, TrainEngine

ImpWeightMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "disabled"]


class Norm(Section):
    """`reward_norm`, `adv_norm`."""

    mean_level: Literal["batch", "group"] | None = "batch"
    mean_leave1out: bool = False
    std_level: Literal["batch", "group"] | None = "batch"
    std_unbiased: bool = True
    eps: Annotated[float, Field(ge=0)] = 1e-5
    group_size: Annotated[int, Field(ge=1)] = 1


class RejectionSampling(Section):
    """The newer spelling of behave_imp_weight_cap and behave_imp_weight_mode, which it fills."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "truncate", "clamp"] = "mask"
    metric: Annotated[Literal["ratio", "kl_k1", "kl_k2", "kl_k3"], NotBuilt()] = "ratio"
    agg: Annotated[Literal["sum", "mean", "max"], NotBuilt(("sum", "mean", "max"))] = "sum"
    upper: Annotated[float, Field(gt=0)] | None = None
    lower: Annotated[float | None, NotBuilt()] = None


class Actor(TrainEngine):
    optimizer: Annotated[Optimizer, BeforeValidator(lambda value: {} if value is None else value)] = Optimizer()
    ppo_n_minibatches: Annotated[int, Field(ge=1)] = 4
    eps_clip: Annotated[float, Field(gt=0)] = 0.2
    eps_clip_higher: Annotated[float, Field(gt=0)] | None = None
    c_clip: Annotated[float, Field(gt=1)] | None = None
    m2_threshold: Annotated[float | None, NotBuilt()] = None
    reward_norm: Norm | None = None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: Annotated[float, Field(gt=0)] = 20.0
    overlong_reward_penalty: bool = False
    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    overlong_penalty_factor: float | None = None
    mask_no_eos_with_zero: bool = False
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    adv_norm: Norm | None = None
    kl_ctl: Annotated[float, Field(ge=0)] = 0.1  # not written counts as 0 where there is no ref
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    use_sapo_loss: Annotated[bool, NotBuilt()] = False
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    recompute_logprob: bool = False
    use_decoupled_loss: bool = False
    behave_imp_weight_cap: Annotated[float, Field(gt=0)] | None = 5.0
    behave_imp_weight_mode: ImpWeightMode = "token_mask"
    rejection_sampling: RejectionSampling | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    prox_logp_method: Annotated[Literal["recompute", "loglinear", "metrics"], NotBuilt()] = "recompute"
    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    freeze_vision: bool = False  # ours

    foreign: ClassVar[dict[str, Foreign]] = {
        **TrainEngine.foreign,
        "log_agent_stats": Foreign(False, why="is for agents, which are not here"),
        "log_agent_stats_keys": Foreign([], why="is for agents, which are not here"),
    }

    @model_validator(mode="before")
    @classmethod
    def _spell_rejection_sampling(cls, value: Any) -> Any:
        newer = value.get("rejection_sampling") if isinstance(value, dict) else None
        if not isinstance(newer, dict):
            return value
        action = "mask" if newer.get("action", "mask") == "mask" else "truncate"
        filled = {"behave_imp_weight_mode": f"{newer.get('level', 'token')}_{action}"}
        if newer.get("upper") is not None:
            filled["behave_imp_weight_cap"] = newer["upper"]
        return {**filled, **value}


class Critic(TrainEngine):
    ppo_n_minibatches: Annotated[int, Field(ge=1)] = 4
    eps_clip: Annotated[float, Field(gt=0)] = 0.5
    mask_no_eos_with_zero: bool = False

    foreign: ClassVar[dict[str, Foreign]] = {**TrainEngine.foreign, "is_critic": Foreign(False, also=(True,))}
