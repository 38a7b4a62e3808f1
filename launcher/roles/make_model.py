"""make-model: a tiny Qwen2.5-VL checkpoint and, if asked for, the picture sets of the quickstart task.

Owns the flags; tiny.checkpoint writes the model, core.data.pictures the pictures. Imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from core.data.pictures import PICTURE_COUNTS, write_pictures
from launcher.roles.tiny.checkpoint import ShapeError, TinyModel, write_checkpoint

_MEANING = {
    "hidden": "hidden size of the text model",
    "layers": "text layers",
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "intermediate": "inner size of the text MLP",
    "vocab": "rows of the embedding (more than the tokenizer has)",
    "vision_depth": "blocks of the vision tower",
    "vision_hidden": "hidden size of the vision tower",
    "vision_heads": "attention heads of the vision tower",
    "vision_intermediate": "inner size of the vision MLP",
    "dtype": "float32 or bfloat16",
    "initializer_range": "standard deviation of the weights",
    "jitter": "spread of biases around 0 and of norm weights around 1",
    "rope_theta": "base of the rotary embedding",
    "max_positions": "longest sequence",
    "min_pixels": "smallest picture after resizing, written to preprocessor_config.json",
    "max_pixels": "largest picture after resizing, written to preprocessor_config.json",
    "shards": "files that the weights are split into",
    "seed": "seed of weights and pictures",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds make-model's arguments; the defaults are the quickstart model."""
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the checkpoint (made if missing)")
    for field in fields(TinyModel):
        if field.name in _MEANING:
            flag = "--" + field.name.replace("_", "-")
            kind = type(field.default)
            parser.add_argument(
                flag, type=kind, default=field.default, help=f"{_MEANING[field.name]} [{field.default}]"
            )
    parser.add_argument(
        "--full-attention", type=int, nargs="+", default=(), help="vision blocks without windows [the last]"
    )
    parser.add_argument("--untied", action="store_true", help="a head of its own instead of the embedding's rows")
    parser.add_argument("--text-only", action="store_true", help="a Qwen2 text model without a vision tower")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also draw the picture sets into DIR")
    for split, count in PICTURE_COUNTS.items():
        parser.add_argument(
            f"--{split}-pictures", type=int, default=count, help=f"pictures of the {split} split [{count}]"
        )


def make(options: argparse.Namespace) -> None:
    """Does what the parsed arguments ask for. Raises ShapeError when the sizes do not fit."""
    sizes = {field.name: getattr(options, field.name) for field in fields(TinyModel) if field.name in _MEANING}
    model = TinyModel(
        **sizes, tied=not options.untied, text_only=options.text_only, full_attention=tuple(options.full_attention)
    )
    write_checkpoint(options.out, model)
    print(f"wrote {options.out}")
    if options.pictures:
        counts = {split: getattr(options, f"{split}_pictures") for split in PICTURE_COUNTS}
        for path in write_pictures(options.pictures, seed=options.seed, counts=counts):
            print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launcher make-model",
        description="Writes a tiny Qwen2.5-VL checkpoint with random weights.",
        epilog="example: python -m launcher make-model /tmp/tiny --pictures /tmp/pictures",
    )
    add_arguments(parser)
    try:
        make(parser.parse_args(argv))
    except ShapeError as error:
        print(f"make-model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make-model: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
