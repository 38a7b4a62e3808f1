"""Pixels, sizes and features against transformers' own processor and numpy; every kind of bad picture."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize

from core.data.images import (
    MAX_PIXELS,
    MIN_PIXELS,
    ImageError,
    Picture,
    decode_png,
    encode_png,
    grid_of,
    image_tokens,
    load_image,
    patches,
    pixel_hash,
    smart_resize,
)
from tests.data.conftest import encoded, noise, picture

# (height, width), limits: odd, tiny, thin, huge, half-way between multiples of 28 (banker's rounding)
SIZES = [
    ((84, 84), {}),
    ((57, 83), {}),
    ((1, 1), {}),
    ((1, 150), {}),
    ((190, 1), {}),
    ((14, 14), {}),
    ((42, 70), {}),
    ((98, 126), {}),
    ((29, 5000), {}),
    ((447, 556), {}),
    ((1536, 2047), {}),
    ((1024, 3333), {"max_pixels": 128 * 784}),
    ((60, 60), {"min_pixels": 64 * 784}),
]


@pytest.mark.parametrize(("size", "limits"), SIZES)
def test_pixel_values_equal_those_of_transformers(size: tuple[int, int], limits: dict[str, Any]) -> None:
    image = Image.fromarray(noise(*size))
    limits = {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS} | limits
    reference = Qwen2VLImageProcessorPil(**limits)(images=[image], return_tensors="np")
    ours = load_image(image, **limits)
    values = patches(ours.pixels)
    assert values.dtype == np.float32
    assert values.shape == reference["pixel_values"].shape
    assert np.abs(values - reference["pixel_values"]).max() <= 1e-6
    assert ours.grid_thw == tuple(reference["image_grid_thw"][0])
    assert ours.original == size
    assert image_tokens(ours.grid_thw) == values.shape[0] // 4


@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    low=st.integers(1, 64),
    high=st.integers(64, 16384),
)
@settings(max_examples=400)
def test_sizes_equal_those_of_transformers(height: int, width: int, low: int, high: int) -> None:
    limits = {"min_pixels": low * 784, "max_pixels": high * 784}
    try:
        expected = reference_resize(height, width, **limits)
    except ValueError:
        with pytest.raises(ImageError, match="crop it"):
            smart_resize(height, width, **limits)
    else:
        assert smart_resize(height, width, **limits) == expected


@given(height=st.integers(1, 400), width=st.integers(1, 400), high=st.integers(8, 128))
@settings(max_examples=60)
def test_a_server_never_resizes_an_accepted_picture_again(height: int, width: int, high: int) -> None:
    limits: dict[str, Any] = {"min_pixels": MIN_PIXELS, "max_pixels": high * 784}
    try:
        ours = load_image(Image.new("RGB", (width, height)), **limits)
    except ImageError:
        assume(False)
    assert reference_resize(*ours.resized, **limits) == ours.resized
    assert reference_resize(*ours.resized, min_pixels=MIN_PIXELS, max_pixels=16384 * 784) == ours.resized


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        ((28, 5600), {"max_pixels": 16 * 784}),
        ((29, 5795), {}),
        ((100, 140), {"min_pixels": 784 * 16, "max_pixels": 784 * 16}),
    ],
)
def test_a_size_that_the_server_would_change_again_is_refused(size: tuple[int, int], limits: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match="becomes"):
        load_image(Image.new("RGB", (size[1], size[0])), **limits)


@pytest.mark.parametrize("size", [(84, 84), (57, 283), (500, 333)])
def test_features_through_the_servers_png_equal_the_trainers_bit_for_bit(size: tuple[int, int]) -> None:
    trainer = load_image(picture(*size))
    server = decode_png(trainer.png())
    assert np.array_equal(server, trainer.pixels)
    assert np.array_equal(patches(server).view(np.uint32), patches(trainer.pixels).view(np.uint32))
    # A server of another make runs its own processor on the PNG; its resize has nothing to do.
    sent: list[Image.Image] = [Image.open(io.BytesIO(trainer.png()))]
    other = Qwen2VLImageProcessorPil()(images=sent, return_tensors="np")
    assert tuple(other["image_grid_thw"][0]) == trainer.grid_thw
    assert np.abs(other["pixel_values"] - patches(trainer.pixels)).max() <= 1e-6


def test_a_patch_holds_its_own_pixels_in_both_frames() -> None:
    pixels = noise(56, 84)
    # Third patch of the second merge block: lower left of rows 0-27, columns 28-55.
    window = pixels[14:28, 28:42].astype(np.float64) / 255
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    expected = np.repeat(((window - mean) / std).transpose(2, 0, 1)[:, None], 2, axis=1).reshape(-1)
    assert np.allclose(patches(pixels)[4 + 2], expected, atol=1e-6, rtol=0)


def test_patches_refuses_a_size_that_was_not_resized() -> None:
    with pytest.raises(ImageError, match="multiples of 28"):
        patches(noise(30, 56))


def test_hash_is_of_pixels_and_shape_and_not_of_the_file() -> None:
    pixels = noise(56, 84)
    fast, small = (encoded(Image.fromarray(pixels), compress_level=level) for level in (0, 9))
    assert fast != small
    assert load_image(fast).hash == load_image(small).hash == pixel_hash(pixels)
    assert pixel_hash(pixels) != pixel_hash(pixels.reshape(84, 56, 3))
    assert len(pixel_hash(pixels)) == 32


# --- pictures that are converted ---


def at_final_size(source: bytes) -> np.ndarray:
    return load_image(source).pixels


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


def test_a_tiny_picture_is_enlarged() -> None:
    ours = load_image(encoded(Image.new("RGB", (1, 1), (10, 20, 30))))
    assert ours.original == (1, 1)
    assert ours.resized == (56, 56)
    assert (ours.pixels == (10, 20, 30)).all()


def test_a_palette_picture_is_converted() -> None:
    image = Image.fromarray(noise(56, 56) // 128 * 255).quantize(8)
    assert image.mode == "P"
    assert np.array_equal(at_final_size(encoded(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_to_8(kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (56, 56), dtype=np.uint16)
    expected = np.rint(values / 257.0).astype(np.uint8)
    assert np.array_equal(at_final_size(encoded(Image.fromarray(values), kind)), grey(expected))


def test_16_bits_a_channel_keep_the_high_bits() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (56, 56, 3), dtype=np.uint16)
    difference = at_final_size(png_of_16_bit_rgb(values)).astype(int) - values / 257.0
    assert np.abs(difference).max() <= 1


def png_of_16_bit_rgb(values: np.ndarray) -> bytes:
    """PIL writes no such file, so that the chunks are put together here."""
    height, width, _ = values.shape
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png_of(struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0), zlib.compress(lines))


def png_of(header: bytes, data: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_cmyk_becomes_rgb() -> None:
    image = Image.new("CMYK", (56, 56), (0, 255, 255, 0))
    assert np.abs(at_final_size(encoded(image, "JPEG", quality=100)).astype(int) - (255, 0, 0)).max() <= 2
    assert (at_final_size(encoded(image, "TIFF")) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (2, lambda x: x[:, ::-1]),
        (3, lambda x: x[::-1, ::-1]),
        (6, lambda x: np.rot90(x, -1)),
        (8, lambda x: np.rot90(x)),
    ],
)
def test_exif_rotation_is_applied(orientation: int, upright: Callable[[np.ndarray], np.ndarray]) -> None:
    pixels = noise(56, 84)
    exif = Image.Exif()
    exif[0x0112] = orientation
    ours = load_image(encoded(Image.fromarray(pixels), exif=exif))
    assert np.array_equal(ours.pixels, upright(pixels))
    assert ours.original == upright(pixels).shape[:2]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_goes_onto_white(kind: str) -> None:
    pixels = noise(56, 56, 4)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    ours = at_final_size(encoded(Image.fromarray(pixels), kind, **options))
    assert np.abs(ours - expected).max() <= 1


def test_grey_with_alpha_goes_onto_white() -> None:
    pixels = noise(56, 56, 2)
    alpha = pixels[..., 1] / 255
    expected = grey(pixels[..., 0] * alpha + 255 * (1 - alpha))
    assert np.abs(at_final_size(encoded(Image.fromarray(pixels, "LA"))) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    image = Image.new(mode, (56, 56), 0)
    transparent = (0, 0, 0) if mode == "RGB" else 0
    assert (at_final_size(encoded(image, transparency=transparent)) == 255).all()


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_is_repeated(mode: str) -> None:
    image = Image.fromarray(noise(56, 56, 1)).convert(mode)
    assert np.array_equal(at_final_size(encoded(image)), grey(np.asarray(image.convert("L"))))


def test_a_phones_photograph_with_a_preview_behind_it_is_one_picture() -> None:
    first, second = Image.new("RGB", (84, 84), "red"), Image.new("RGB", (84, 84), "blue")
    body = encoded(first, "MPO", save_all=True, append_images=[second])
    assert load_image(body).pixels[..., 0].mean() > 200


# --- pictures that are refused ---


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(noise(56, 56, seed=n)) for n in range(2)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def bomb(side: int) -> bytes:
    return png_of(struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), zlib.compress(b"\0" * 64))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not a picture"),
        (picture()[:200], "broken PNG"),
        (encoded(Image.fromarray(noise(60, 80)), "JPEG")[:-900], "broken JPEG"),
        (picture()[:40] + b"\0" * 400, "broken"),
        (animated("GIF"), "animated"),
        (animated("WEBP"), "animated"),
        (animated("PNG"), "animated"),
        (animated("TIFF"), "several pages"),
        (bomb(9000), "bomb"),
        (bomb(60000), "bomb"),
        (encoded(Image.new("RGB", (2, 500))), "200 times"),
        (encoded(Image.fromarray(np.zeros((56, 56), np.float32)), "TIFF"), "floating-point"),
        (encoded(Image.fromarray(np.full((56, 56), 1 << 20, np.int32)), "TIFF"), "do not fit 16 bits"),
        (encoded(Image.new("RGB", (56, 56)), "EPS"), "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not a picture"),
        (7, "not int"),
        (None, "not NoneType"),
        ({"bytes": None, "path": None}, "both bytes and path are empty"),
        ({"bytes": b"", "path": None}, "empty"),
        (Path("/nowhere/at/all.png"), "cannot read"),
        (Path("/dev/null"), "not a regular file"),
        ("a\0b.png", "cannot read"),
        ("a" * 5000, "cannot read"),
    ],
)
def test_a_bad_picture_is_refused_with_its_reason(source: object, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        load_image(source)


@given(cut=st.integers(0, 2000), junk=st.binary(max_size=64), at=st.integers(0, 2000))
@settings(max_examples=150)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(cut: int, junk: bytes, at: int) -> None:
    body = encoded(Image.fromarray(noise(30, 30)), "PNG" if cut % 2 else "JPEG")
    try:
        ours = load_image(body[:at] + junk + body[at + len(junk) : len(body) - cut])
    except ImageError:
        return
    assert isinstance(ours, Picture)


def test_paths_stay_below_their_root(tmp_path: Path) -> None:
    root = tmp_path / "set"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "a.png").write_bytes(picture())
    (tmp_path / "secret.png").write_bytes(picture())
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    expected = load_image(picture()).hash
    assert load_image("deep/a.png", root=root).hash == expected
    assert load_image({"bytes": None, "path": str(root / "deep" / "a.png")}, root=root).hash == expected
    for outside in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(ImageError, match="outside"):
            load_image(outside, root=root)


@pytest.mark.parametrize(
    "body", [b"", b"\x89PNG", encoded(Image.new("L", (28, 28))), encoded(Image.new("RGB", (28, 28)), "JPEG")]
)
def test_decode_png_takes_nothing_but_our_own(body: bytes) -> None:
    with pytest.raises(ImageError):
        decode_png(body)


def test_grid_and_tokens() -> None:
    pixels = noise(56, 84)
    assert decode_png(encode_png(pixels)).shape == pixels.shape
    assert grid_of(pixels) == (1, 4, 6)
    assert image_tokens((1, 4, 6)) == 6
