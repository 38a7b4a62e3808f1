"""Images of requests, decoded once however many samples ask about them.

Owns the reading of SGLang's image_data (data URLs, base64) and a bounded memory of decoded images. It decodes in
threads, so that the event loop never waits for a picture; features are the model's affair.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import xxhash

from core.data.images import ImageError, load_image, patches
from core.inference.embedded.request import BadRequestError, PromptImage


class Pictures:
    """`min_pixels` and `max_pixels` are the checkpoint's: what a trainer has resized already stays as it is."""

    def __init__(self, *, min_pixels: int, max_pixels: int, max_bytes: int = 256 << 20, threads: int = 2) -> None:
        self.min_pixels = min_pixels
        self.max_pixels = max_pixels
        self.max_bytes = max_bytes
        self.decoded = 0
        self._bytes = 0
        self._known: OrderedDict[str, PromptImage] = OrderedDict()
        self._decoding: dict[str, asyncio.Future[PromptImage]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pictures")

    async def read(self, image_data: object) -> tuple[PromptImage, ...]:
        """All images of a request. Raises BadRequestError naming the one that cannot be read."""
        if image_data is None:
            return ()
        sources = image_data if isinstance(image_data, list) else [image_data]
        return tuple([await self._one(source, number) for number, source in enumerate(sources)])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _one(self, source: object, number: int) -> PromptImage:
        if not isinstance(source, str):
            raise BadRequestError(f"image_data[{number}] must be a data URL or base64, got {type(source).__name__}")
        key = xxhash.xxh3_128_hexdigest(source.encode())
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        if key not in self._decoding:
            loop = asyncio.get_running_loop()
            self._decoding[key] = loop.run_in_executor(self._pool, self._decode, source)
        try:
            image = await asyncio.shield(self._decoding[key])
        except (ImageError, ValueError) as error:
            raise BadRequestError(f"image_data[{number}]: {error}") from error
        finally:
            if key in self._decoding and self._decoding[key].done():
                del self._decoding[key]
        self._remember(key, image)
        return image

    def _decode(self, source: str) -> PromptImage:
        head, comma, body = source.partition(",")
        if source.startswith("data:") and not (comma and head.endswith(";base64")):
            raise ImageError("not a data URL of the form data:image/png;base64,…")
        if not comma and "://" in source[:16]:
            raise ImageError("is an address; the embedded server fetches nothing, send a data URL")
        try:
            data = base64.b64decode(body if comma else source, validate=True)
        except binascii.Error as error:
            raise ImageError(f"not base64 ({error})") from error
        picture = load_image(data, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return PromptImage(picture.hash, picture.grid_thw, patches(picture.pixels))

    def _remember(self, key: str, image: PromptImage) -> None:
        if key in self._known:
            return
        self.decoded += 1
        self._known[key] = image
        self._bytes += image.patches_PK.nbytes
        while self._bytes > self.max_bytes and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].patches_PK.nbytes
