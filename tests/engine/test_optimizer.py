"""AdamW, SGD and schedules against torch and against formulas; the norm of a gradient in parts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.engine.optimizer import Optimizer, gradient_norm, learning_rate

F64 = torch.float64


def section(**changed):
    values = {
        "type": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "gradient_clipping": 1.0,
        "lr_scheduler_type": "constant",
        "min_lr_ratio": 0.0,
        "warmup_steps_proportion": 0.0,
    }
    return SimpleNamespace(**{**values, **changed})


def parameters(dtype=F64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"proj.weight": (5, 4), "proj.bias": (5,), "norm.weight": (4,), "embed.weight": (7, 4)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=F64).to(dtype))
        for name, shape in shapes.items()
    }


def gradients_of(step: int, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator, dtype=F64) for name, p in named.items()}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_updates_are_torchs_with_no_decay_on_norms_and_biases(kind):
    settings, ours, theirs = section(type=kind), parameters(), parameters()
    groups = [
        {"params": [theirs["proj.weight"], theirs["embed.weight"]], "weight_decay": 0.1},
        {"params": [theirs["proj.bias"], theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99), eps=1e-8)
        if kind == "adam"
        else torch.optim.SGD(groups, lr=1.0)
    )
    optimizer = Optimizer(ours, settings)
    for step in range(12):
        rate = 1e-2 * (step + 1)
        for group in reference.param_groups:
            group["lr"] = rate
        for name, gradient in gradients_of(step, ours).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(rate)
        reference.step()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-13)


def test_a_parameter_without_gradient_is_left_alone_and_starts_at_its_own_first_step():
    """A tower that saw no image yet: neither decayed nor, later, corrected for steps that it did not take."""
    ours = parameters()
    optimizer = Optimizer(ours, section())
    start = ours["proj.weight"].detach().clone()
    for step in range(3):
        ours["embed.weight"].grad = gradients_of(step, ours)["embed.weight"]
        optimizer.step(1e-2)
    assert torch.equal(ours["proj.weight"], start)
    gradient = gradients_of(9, ours)["proj.weight"]
    ours["proj.weight"].grad = gradient.clone()
    optimizer.step(1e-2)
    # Adam's first step is lr·sign(g), after decoupled decay
    wanted = start * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(ours["proj.weight"].detach(), wanted, rtol=1e-12, atol=1e-13)


def test_a_hundred_steps_at_2e_6_move_float32_masters_as_float64_to_one_percent():
    """Weights of the size that models have, gradients that agree on a direction and scatter around it."""
    settings = section(lr=2e-6, weight_decay=0.01, beta2=0.999)
    single, double = parameters(torch.float32), parameters(F64)
    with torch.no_grad():
        for name in double:
            single[name].mul_(0.05).add_(1.0 if name == "norm.weight" else 0.0)
            double[name].copy_(single[name])
    optimizers = [(named, Optimizer(named, settings)) for named in (single, double)]
    start = {name: p.detach().clone() for name, p in double.items()}
    signal = gradients_of(1000, double)
    for step in range(100):
        for named, optimizer in optimizers:
            for name, noise in gradients_of(step, named).items():
                named[name].grad = (signal[name] + 0.3 * noise).to(named[name].dtype)
            optimizer.step(2e-6)
    with torch.no_grad():
        for name in double:
            wanted, moved = double[name] - start[name], single[name].double() - start[name]
            assert ((moved - wanted).norm() / wanted.norm()).item() < 0.01, name
            # the reason for masters: in bf16 not one of these steps would have moved a weight
            half = start[name].to(torch.bfloat16)
            large = half.abs() > 2e-3
            assert torch.equal((half - 2e-6)[large], half[large])


@pytest.mark.parametrize(
    ("kind", "share_left"),
    [
        ("constant", lambda x: 1.0),
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
    ],
)
def test_schedules_warm_up_then_fall_to_the_minimum(kind, share_left):
    settings = section(lr=2.0, lr_scheduler_type=kind, min_lr_ratio=0.1, warmup_steps_proportion=0.05)
    found = [learning_rate(settings, step, 200) for step in range(1, 201)]
    assert found[:10] == pytest.approx([2.0 * (i + 1) / 11 for i in range(10)])
    low = 1.0 if kind == "constant" else 0.1
    for step in range(11, 201):
        share = share_left((step - 11) / 190)
        assert found[step - 1] == pytest.approx(2.0 * (low + (1 - low) * share if kind != "constant" else 1.0))
    assert found[10] == 2.0
    assert min(found) > 0
    assert learning_rate(settings, 400, 200) == pytest.approx(2.0 if kind == "constant" else 0.2)


def test_the_norm_of_one_process_is_the_norm_of_everything():
    named = parameters()
    for step, name in enumerate(named):
        named[name].grad = gradients_of(step, named)[name]
    named["norm.weight"].grad = None
    wanted = math.sqrt(sum(p.grad.square().sum().item() for p in named.values() if p.grad is not None))
    assert gradient_norm(named, None) == pytest.approx(wanted, rel=1e-14)
