"""Pictures: decoded once, resized once, and cut into the patches that the vision tower reads.

Owns every decision about pixels (size, orientation, transparency, depth, what is refused). Knows nothing of rows,
prompts or processes. The server's way (PNG, decode_png, patches) and the trainer's (pixels, patches) give the same
features bit for bit, because a Picture already has the size that smart_resize would give it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

PATCH, MERGE, TEMPORAL_PATCH = 14, 2, 2
FACTOR = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
MAX_SOURCE_PIXELS = 64 << 20
MAX_SOURCE_BYTES = 64 << 20
MAX_ASPECT = 200
# No format that runs a program (EPS) or that nobody trains on.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Image.open's own first choice has all of them but these two, and fails on a format that is not loaded.
_LOADED = (TiffImagePlugin, WebPImagePlugin)
_MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
_STD = np.array([0.26862954, 0.26130258, 0.27577711])
# Normalised value of each of the 256 byte values in each channel.
_LEVELS_C256 = ((np.arange(256) / 255 - _MEAN[:, None]) / _STD[:, None]).astype(np.float32)

Grid = tuple[int, int, int]


class ImageError(Exception):
    """A picture that is refused; the message says why."""


@dataclass(frozen=True)
class Picture:
    """A decoded picture at the size that the model sees."""

    pixels: np.ndarray  # uint8 [height, width, 3], RGB
    original: tuple[int, int]  # height, width of the source, upright

    @property
    def resized(self) -> tuple[int, int]:
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def grid_thw(self) -> Grid:
        return grid_of(self.pixels)

    @property
    def hash(self) -> str:
        return pixel_hash(self.pixels)

    def png(self) -> bytes:
        return encode_png(self.pixels)


def smart_resize(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Size in multiples of 28 with nearly the same shape and an area within the limits, as Qwen2-VL computes it.

    Raises ImageError for a shape longer than 200 times its width. A very thin picture may still exceed max_pixels.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageError(f"{width}x{height} is more than {MAX_ASPECT} times as long as wide; crop it")
    # Python's round: halves go to the even multiple.
    high, wide = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        wide = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * grow / FACTOR) * FACTOR
        wide = math.ceil(width * grow / FACTOR) * FACTOR
    return high, wide


def load_image(
    source: object, *, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS, root: Path | None = None
) -> Picture:
    """Decodes, uprights, flattens and resizes one picture.

    `source` is the file's bytes, a path, a PIL image, or a mapping with "bytes" or "path" (the hub's Image feature).
    With `root`, a path must lie below it, and a relative one starts there. Raises ImageError naming the reason.
    """
    opened = _open(source, root)
    try:
        upright = _upright_rgb(opened)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise nearly every type there is on a broken file
        raise ImageError(f"broken {opened.format or 'picture'}: {error}") from error
    high, wide = smart_resize(upright.height, upright.width, min_pixels=min_pixels, max_pixels=max_pixels)
    _require_final(high, wide, min_pixels, max_pixels, (upright.width, upright.height))
    pixels = np.array(upright.resize((wide, high), Image.Resampling.BICUBIC))
    return Picture(pixels=pixels, original=(upright.height, upright.width))


def _require_final(high: int, wide: int, min_pixels: int, max_pixels: int, size: tuple[int, int]) -> None:
    """Refuses a size that the server would change again, or that is larger than planned for."""
    described = f"{size[0]}x{size[1]} becomes {wide}x{high}"
    if high * wide > max_pixels:
        raise ImageError(f"too thin: {described}, more than max_pixels={max_pixels}; crop it or raise max_pixels")
    if high * wide < min_pixels:
        raise ImageError(f"{described}, less than min_pixels={min_pixels}; set min_pixels further below max_pixels")
    if max(high, wide) > MAX_ASPECT * min(high, wide):
        raise ImageError(f"too thin: {described}, more than {MAX_ASPECT} times as long as wide; crop it")


def _open(source: object, root: Path | None) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Mapping):
        body, path = source.get("bytes"), source.get("path")
        if body is None and path is None:
            raise ImageError("no picture: both bytes and path are empty")
        return _open(body if body is not None else path, root)
    if isinstance(source, str | Path):
        source = _read(Path(source), root)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise ImageError(f"a picture is bytes, a path or a mapping with bytes or path, not {type(source).__name__}")
    if not len(source):
        raise ImageError("the file is empty")
    if len(source) > MAX_SOURCE_BYTES:
        raise ImageError(f"the file has {len(source):,} bytes, more than {MAX_SOURCE_BYTES:,}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(source), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise ImageError(f"decompression bomb: {error}") from error
        except UnidentifiedImageError as error:
            raise ImageError(f"not a picture, or broken: none of {', '.join(FORMATS)} reads it") from error
        except Exception as error:  # as above
            raise ImageError(f"broken picture: {error}") from error


def _read(path: Path, root: Path | None) -> bytes:
    try:
        if root is not None:
            resolved = (root / path).resolve()
            if not resolved.is_relative_to(root.resolve()):
                raise ImageError(f"{path} lies outside of {root}")
            path = resolved
        if path.exists() and not path.is_file():
            raise ImageError(f"{path} is not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_SOURCE_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL byte in a name is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ImageError(f"cannot read {str(path)[:200]!r}: {reason}") from error


def _upright_rgb(image: Image.Image) -> Image.Image:
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise ImageError(f"{width}x{height} is more than {MAX_SOURCE_PIXELS:,} pixels (a decompression bomb?)")
    # MPO is a JPEG photograph with previews behind it; its first picture is the photograph.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise ImageError(f"animated or of several pages ({image.n_frames} frames); give one picture")  # type: ignore[attr-defined]
    image.load()
    return _flatten(ImageOps.exif_transpose(image))


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ImageError("floating-point pixels have no agreed white; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;"):
        return _from_16_bit(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if image.mode in ("RGBa", "La"):
            image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ImageError(f"pixels from {values.min()} to {values.max()} do not fit 16 bits; save it with 8 or 16")
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    return grey.convert("RGB")


def encode_png(pixels: np.ndarray) -> bytes:
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG", compress_level=1)
    return body.getvalue()


def decode_png(body: bytes) -> np.ndarray:
    """Pixels [height, width, 3] of a PNG that encode_png wrote. Raises ImageError on anything else."""
    try:
        with Image.open(io.BytesIO(body), formats=("PNG",)) as image:
            if image.mode != "RGB" or image.width * image.height > MAX_SOURCE_PIXELS:
                raise ImageError(f"not one of our pictures: {image.mode}, {image.width}x{image.height}")
            return np.array(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"broken PNG: {error}") from error


def pixel_hash(pixels: np.ndarray) -> str:
    """Hash of the pixels and their shape: 32 hex digits, the same whatever the PNG encoder does."""
    digest = xxhash.xxh3_128(np.array(pixels.shape, dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def grid_of(pixels: np.ndarray) -> Grid:
    """(frames, rows, columns) of 14-pixel patches."""
    return 1, pixels.shape[0] // PATCH, pixels.shape[1] // PATCH


def image_tokens(grid_thw: Grid) -> int:
    """Placeholder tokens that stand for a picture: one for each 2x2 patches."""
    return math.prod(grid_thw) // MERGE**2


def patches(pixels: np.ndarray) -> np.ndarray:
    """Normalised patches [rows x columns, 1176] float32, in the order of Qwen2-VL's processor.

    Merge blocks of 2x2 patches come one after the other; a patch is channel, frame (the picture twice), row, column.
    Raises ImageError when the sides are not multiples of 28.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.shape[0] % FACTOR or pixels.shape[1] % FACTOR:
        raise ImageError(f"pixels of shape {pixels.shape}; sides must be multiples of {FACTOR}")
    _, rows, columns = grid_of(pixels)
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, PATCH * PATCH)
    out = np.empty((rows * columns, 3, TEMPORAL_PATCH, PATCH * PATCH), dtype=np.float32)
    for channel in range(3):
        out[:, channel] = _LEVELS_C256[channel][blocks[:, channel]][:, None]
    return out.reshape(rows * columns, -1)
