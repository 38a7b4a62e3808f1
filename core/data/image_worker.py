"""The child that decodes pictures: one request after the other on stdin, one answer each on stdout.

Owns the frames of that pipe (a length, a JSON header, a body); decoding is core.data.images. It ends with its parent's
end of the pipe, and has limited memory, so that no picture can take the data service or the node down.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

from core.data.images import ImageError, load_image
from core.telemetry.phases import open_phases, reach

MEMORY_BYTES = 4 << 30
_LENGTH = 4


def frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One message: length of the header, header with the body's size, body."""
    text = json.dumps(header | {"size": len(body)}).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + body


def answer_to(header: dict[str, Any], body: bytes) -> bytes:
    """The frame that answers a request: the picture's facts and its PNG, or why it is refused."""
    source = header["path"] if header["path"] is not None else body
    limits = {"min_pixels": header["min_pixels"], "max_pixels": header["max_pixels"]}
    try:
        picture = load_image(source, root=Path(header["root"]), **limits)
        png = picture.png()
    except ImageError as error:
        return frame({"error": str(error)})
    except MemoryError:
        return frame({"error": f"decoding it takes more than {MEMORY_BYTES >> 30} GiB of memory"})
    facts = {
        "hash": picture.hash,
        "original": picture.original,
        "resized": picture.resized,
        "grid_thw": picture.grid_thw,
    }
    return frame(facts, png)


def _read(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    length = pipe.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    header = json.loads(pipe.read(int.from_bytes(length, "little")))
    return header, pipe.read(header["size"])


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Whatever a library prints must not land among the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    open_phases(None, "image-worker")
    while (request := _read(sys.stdin.buffer)) is not None:
        reach("decoding")
        answers.write(answer_to(*request))
        answers.flush()


if __name__ == "__main__":
    main()
