"""Tiny checkpoints behind a real embedded server, and the transformers model that it is compared with."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import urllib3
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.inference.embedded.assembly import assemble
from core.inference.embedded.request import Prompt, PromptImage, Request, Sampling
from core.inference.embedded.server import EmbeddedServer
from models.archon.registry import family_of

TOKEN = "secret"


def build(directory: Path, **options: Any) -> EmbeddedServer:
    family = family_of(directory)
    dtype = options.get("dtype", torch.float32)
    args = family.args.from_pretrained(directory, dtype=dtype)
    model = family.model(args).eval().requires_grad_(False)
    adapter = family.adapter(args)
    options.setdefault("context_length", 512)
    return assemble(
        model, args, lambda path: adapter.load_into(model, path), directory=directory, token=TOKEN, **options
    )


@dataclass
class Remote:
    """A served engine as a client sees it, and the server object for what no client can see."""

    url: str
    server: EmbeddedServer
    pool: urllib3.PoolManager
    token: str = TOKEN

    @property
    def image(self) -> int:
        token = self.server.traits.image_token_id
        assert token is not None
        return token

    @property
    def video(self) -> int:
        token = self.server.traits.video_token_id
        assert token is not None
        return token

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.token}"}
        reply = self.pool.request(
            method, self.url + path, json=body, headers=headers, timeout=60, retries=False, **more
        )
        return reply.status, reply.json()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def get(self, path: str) -> dict[str, Any]:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def generate(self, input_ids: Sequence[int], images: Sequence[Image.Image] = (), **sampling: Any) -> dict[str, Any]:
        return self.post("/generate", **generate_body(input_ids, images, **sampling))

    def stream(
        self, input_ids: Sequence[int], images: Sequence[Image.Image] = (), **sampling: Any
    ) -> Generator[dict, None, None]:
        """Chunks as they come; closing the iterator hangs up."""
        body = {**generate_body(input_ids, images, **sampling), "stream": True}
        reply = self.pool.request(
            "POST",
            self.url + "/generate",
            json=body,
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=60,
            retries=False,
            preload_content=False,
        )
        assert reply.status == 200, reply.data
        try:
            pending = b""
            for block in reply.stream(1 << 16):
                *lines, pending = (pending + block).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
        finally:
            reply.close()


@contextmanager
def serving(directory: Path, **options: Any) -> Iterator[Remote]:
    """The real server on a real socket, its event loop in a thread of this process."""
    server = build(directory, **options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server.engine.start()
    url = asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    pool = urllib3.PoolManager(maxsize=64)
    try:
        yield Remote(url, server, pool)
    finally:
        pool.clear()
        server.engine.stop()
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def data_url(image: Image.Image) -> str:
    body = io.BytesIO()
    image.save(body, "PNG")
    return "data:image/png;base64," + base64.b64encode(body.getvalue()).decode()


def generate_body(input_ids: Sequence[int], images: Sequence[Image.Image] = (), **sampling: Any) -> dict[str, Any]:
    rid = sampling.pop("rid", uuid.uuid4().hex)
    body = {
        "input_ids": [int(token) for token in input_ids],
        "sampling_params": {"temperature": 0.0, **sampling},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "rid": rid,
    }
    return body | ({"image_data": [data_url(image) for image in images]} if images else {})


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


class Reference:
    """transformers' own model of the same checkpoint."""

    def __init__(self, directory: Path) -> None:
        config = AutoConfig.from_pretrained(directory)
        kind: Any = AutoModelForCausalLM if config.model_type == "qwen2" else Qwen2_5_VLForConditionalGeneration
        self.model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        raw = json.loads((directory / "config.json").read_text())
        self.image, self.video = raw.get("image_token_id"), raw.get("video_token_id")
        self.directory = directory

    def inputs(self, input_ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Expanded ids and processed pictures, by transformers' processor."""
        if not images:
            return {"input_ids": torch.tensor([list(input_ids)])}
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.directory)
        features = processor(images=list(images), return_tensors="pt")
        counts = iter((features["image_grid_thw"].prod(dim=1) // 4).tolist())
        expanded = [t for token in input_ids for t in ([token] * next(counts) if token == self.image else [token])]
        ids = torch.tensor([expanded])
        return {"input_ids": ids, "mm_token_type_ids": (ids == self.image).int(), **features}

    def greedy(self, input_ids: Sequence[int], images: Sequence[Image.Image], count: int, **more: Any) -> list[int]:
        inputs = self.inputs(input_ids, images)
        if self.image is not None:
            more["suppress_tokens"] = [self.image, self.video, *more.get("suppress_tokens", [])]
        out = self.model.generate(**inputs, max_new_tokens=count, do_sample=False, **more)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def logits(
        self, input_ids: Sequence[int], images: Sequence[Image.Image], output_ids: Sequence[int]
    ) -> torch.Tensor:
        """Of the positions that predict each output token."""
        inputs = self.inputs(input_ids, images)
        prompt = inputs["input_ids"].shape[1]
        tail = torch.tensor([list(output_ids)])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], tail], dim=1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image).int()
        with torch.no_grad():
            return self.model(**inputs).logits[0, prompt - 1 : -1]


def engine_request(server: EmbeddedServer, rid: str, ids: Sequence[int], **sampling: Any) -> Request:
    """A request for a batch that is driven by hand."""
    images: tuple[PromptImage, ...] = sampling.pop("images", ())
    prompt = Prompt.expand(list(ids), images, server.traits)
    return Request(rid, prompt, Sampling.parse({"ignore_eos": True, **sampling}, server.traits))
