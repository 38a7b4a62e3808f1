"""The quickstart's GRPO with real servers on this machine's cores, beside the embedded server's accuracy.

    python -m launcher install vllm --device cpu && python -m launcher install sglang --device cpu
    python -m bench.quickstart_servers --check

One model is taught; then the same configuration is trained with each backend. Owns the comparison; the commands of the
quickstart are bench.quickstart's.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time

from bench.quickstart import ROOT, Trial, free_name, run_trial, summary

NEAR = 0.1


def train(trial: Trial, backend: str) -> str:
    """The run's name, under runs/."""
    name = f"{trial.name}-{backend}"
    words = [
        *(sys.executable, "-m", "launcher", "run", "--emulate", "configs/quickstart.yaml"),
        *(f"seed={trial.seed}", f"trial_name={name}", f"allocation_mode={backend}:d1+archon:d1"),
        *(f"actor.path=runs/quickstart-sft/{trial.name}/hub/latest", "embedded.stands_in=false"),
        *("vllm.max_model_len=2048", "sglang.context_length=2048", "rollout.setup_timeout=600"),
    ]
    print("$ python " + shlex.join(words[1:]), flush=True)
    subprocess.run(words, cwd=ROOT, check=True, timeout=3600)
    return f"runs/quickstart/{name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="the quickstart's task with vLLM and SGLang on the CPU")
    parser.add_argument("--backends", nargs="+", default=["vllm", "sglang"], choices=["vllm", "sglang"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where an accuracy is not within {NEAR} of it")
    arguments = parser.parse_args()
    trial = Trial(arguments.seed, free_name("servers"))
    run_trial(trial)
    expected = summary(f"runs/quickstart/{trial.name}")["evaluations"]["valid"][-1]["accuracy"]
    print(f"embedded: {expected:.3f}", flush=True)
    missed = False
    for backend in arguments.backends:
        began = time.monotonic()
        found = summary(train(trial, backend))["evaluations"]["valid"][-1]["accuracy"]
        near = abs(found - expected) <= NEAR
        missed = missed or not near
        said = "" if near else f"  ✗ not within {NEAR}"
        print(f"{backend}: {found:.3f} ({time.monotonic() - began:.0f} s){said}", flush=True)
    return int(arguments.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
