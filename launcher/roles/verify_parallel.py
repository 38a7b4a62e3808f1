"""Process of `verify-parallel`: rows and model of a configuration under several layouts, and the table of distances.

Exits 0 when every layout is within tolerance, 1 when one is not or cannot be computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from core.config import Config, load
from core.data.hub import resolve
from core.data.tokenizer import Tokenizer
from core.engine.certificate import Work
from core.engine.documents import TokenRules
from core.engine.microbatch import Limits
from core.parallel.mesh import Degrees
from launcher.allocation import parse
from launcher.roles.verification.ranks import Layout, Spec, VerificationError, lines, verify
from launcher.roles.verification.rows import read
from models.archon.registry import family_of


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--layouts", nargs="+", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = load(arguments.config, [])
    try:
        verdicts = verify(spec_of(config, arguments))
    except VerificationError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        print(f"{config.actor.path} in {config.actor.dtype}, torch {torch.__version__}, {arguments.device}")
        print("\n".join(lines(verdicts)))
    return int(any(verdict.too_far for verdict in verdicts))


def spec_of(config: Config, arguments: argparse.Namespace) -> Spec:
    model = resolve(config.actor.path, cache=config.paths.cache, kind="model")
    args = family_of(model).args.from_pretrained(model)
    documents, pixels = read(config, Tokenizer(config.tokenizer_path or model), arguments.rows)
    rules = TokenRules(
        args.image_token_id,
        args.video_token_id,
        args.spatial_merge_size,
        args.tokens_per_second,
        temperature=config.actor.temperature,
    )
    longest = max(len(document.ids) for document in documents)
    limit = max(longest, config.actor.mb_spec.max_tokens_per_mb or 0)
    work = Work(documents, pixels, rules, Limits(limit, limit * args.spatial_merge_size**2))
    names = ("freeze_vision", "gradient_checkpointing", "dtype", "grad_reduce_dtype")
    actor = SimpleNamespace(**{name: getattr(config.actor, name) for name in names})
    archon = config.actor.archon
    actor.archon = SimpleNamespace(**{name: getattr(archon, name) for name in type(archon).model_fields})
    styles = ("ulysses", "allgather")
    layouts = [
        Layout(f"{word} {style}" if dims.c > 1 else word, degrees, style)
        for word in arguments.layouts
        for dims in [parse(word).components[0].dims]
        for degrees in [Degrees.of_allocation(dims.d, dims.c, dims.t)]
        for style in (styles if dims.c > 1 else styles[:1])
    ]
    return Spec(model, actor, work, tuple(layouts), arguments.device, arguments.tolerance)


if __name__ == "__main__":
    sys.exit(main())
