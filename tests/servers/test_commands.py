"""Generated command lines, taken by the real parsers; and what they say and must not say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import Config, load
from core.config.flags import flags_of
from core.inference.commands import Launch, Seat, launch
from launcher.plan import plan
from launcher.servers.environment import python_of
from tests.servers.conftest import BACKENDS, available, configuration

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "qwen2_5_vl_3b_geometry3k_grpo.yaml"
REAL = [backend for backend in BACKENDS if backend != "embedded"]
HERE = [backend for backend in REAL if available(backend)]
Parse = Callable[[str, list[list[str]]], list[str | None]]
SHAPES = [(tensor, pipeline, nodes) for tensor in (1, 2, 4, 8) for pipeline in (1, 2) for nodes in (1, 2)]


def seat(**changes: object) -> Seat:
    fields = {"python": "python", "model": "/models/m", "served_name": "policy-1", "device": "cuda", "port": 12000}
    return Seat(**{**fields, **changes})  # type: ignore[arg-type]


def recipe(*overrides: str) -> Config:
    return load(RECIPE, overrides, on_warning=lambda line: None)


def after_program(line: Launch) -> list[str]:
    words = list(line.argv)
    start = words.index("serve") + 1 if "serve" in words else words.index("sglang.launch_server") + 1
    return words[start:]


@pytest.fixture(scope="module")
def parse() -> Parse:
    """What the real parser of a backend says of each command line; null: it takes it."""

    def run(backend: str, lines: list[list[str]]) -> list[str | None]:
        python = python_of(backend, configuration(Path("/models/m")), "cpu")
        done = subprocess.run(
            [python, "-P", str(ROOT / "bench" / "server_flags.py"), backend, "parse"],
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", HERE)
def test_the_real_parser_takes_every_shape(parse: Parse, backend: str) -> None:
    """The recipe and the shapes of 7B, 32B and 72B; one server over two nodes too; and a wrong flag is refused."""
    lines, names = [], []
    for device in ("cpu", "cuda"):
        for tensor, pipeline, nodes in SHAPES:
            for rank in range(nodes):
                where = {"host": "10.0.0.2", "head": "10.0.0.1", "head_port": 12001}
                place = seat(device=device, tensor=tensor, pipeline=pipeline, nodes=nodes, node_rank=rank, **where)
                lines.append(after_program(launch(backend, recipe(), place)))
                names.append((device, tensor, pipeline, nodes, rank))
    odd = (
        recipe(f"{backend}.extra={{enable-mixed-chunk: true}}")
        if backend == "sglang"
        else recipe(
            "vllm.no_enable_prefix_caching=false",
            "vllm.enable_prefix_caching=false",
            "vllm.limit_mm_per_prompt={image: 4}",
        )
    )
    lines.append(after_program(launch(backend, odd, seat())))
    lines.append([*lines[0], "--no-such-flag-anywhere"])
    *said, control = parse(backend, lines)
    assert [(name, words) for name, words in zip(names, said, strict=False) if words] == [] and said[-1] is None
    assert control is not None


def layouts(backend: str) -> list[tuple[str, str, int]]:
    """(model, allocation, nodes of 8): the recipe's, and larger models cut over 2, 4 and 8 GPUs of a node."""
    return [
        ("3B", f"{backend}:d4p1t1+d4p1t1", 1),
        ("7B", f"{backend}:d4t2+d8", 2),
        ("7B", f"{backend}:d2t4+d8", 2),
        ("32B", f"{backend}:d2t4+d4t8", 5),
        ("32B", f"{backend}:d4t2+d4t8", 5),
        ("32B", f"{backend}:d1t8+d4t8", 5),
        ("72B", f"{backend}:d1t8+d8t8", 9),
        ("72B", f"{backend}:d2t4+d8t8", 9),
        ("72B", f"{backend}:d2p2t2+d8t8", 9),
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", HERE)
def test_what_is_planned_is_what_the_real_parser_takes(parse: Parse, backend: str) -> None:
    lines = []
    for size, allocation, nodes in layouts(backend):
        words = [f"actor.path=Qwen/Qwen2.5-VL-{size}-Instruct", f"allocation_mode={allocation}"]
        config = recipe(*words, f"cluster.n_nodes={nodes}", "cluster.n_gpus_per_node=8", "scheduler.type=local")
        part = plan(config).partition("inference")
        assert part is not None
        for node in part.nodes:
            for server in node.servers:
                assert len(server.gpus) == part.t * part.p
                here = seat(tensor=part.t, pipeline=part.p)
                lines.append(after_program(launch(backend, config, here)))
    assert [said for said in parse(backend, lines) if said] == [] and len(lines) >= 20


@pytest.mark.parametrize("backend", HERE)
def test_the_lists_are_what_the_parser_of_that_version_has(backend: str) -> None:
    python = python_of(backend, configuration(Path("/models/m")), "cpu")
    done = subprocess.run(
        [python, "-P", str(ROOT / "bench" / "server_flags.py"), backend, "list"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    read = json.loads(done.stdout)
    listed = json.loads((ROOT / "core" / "config" / "flags" / f"{backend}-{read['version']}.json").read_text())
    assert sorted(read["flags"]) == sorted(listed["flags"])


@pytest.mark.parametrize("backend", REAL)
def test_a_command_names_its_place_and_no_secret(backend: str) -> None:
    made = launch(backend, recipe(), seat(tensor=2, pipeline=2, port=12016))
    words = after_program(made)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        assert words[words.index(flags_of(backend).spelling(name)) + 1] == "2"
    assert words[words.index("--served-model-name") + 1] == "policy-1"
    assert not [word for word in words if "api-key" in word or word == "token"]
    assert made.env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("backend", REAL)
def test_parts_meet_at_the_head_and_face_each_other_on_their_own_interface(backend: str) -> None:
    place = {"nodes": 2, "tensor": 16, "head": "10.0.0.1", "head_port": 12001}
    lines = [launch(backend, recipe(), seat(node_rank=n, host=f"10.0.0.{n + 1}", **place)) for n in (0, 1)]
    name = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}[backend]
    assert [line.env[name] for line in lines] == ["10.0.0.1", "10.0.0.2"]
    for rank, line in enumerate(lines):
        said = " ".join(line.argv)
        assert f"--nnodes 2 --node-rank {rank}" in said
        meeting = {"vllm": "--master-addr 10.0.0.1 --master-port 12001", "sglang": "--dist-init-addr 10.0.0.1:12001"}
        assert meeting[backend] in said and "--host 127.0.0.1" in said  # HTTP is never on the interface
        assert ("--headless" in said) == (backend == "vllm" and rank == 1)


@pytest.mark.parametrize("backend", REAL)
def test_extra_comes_last_as_it_stands(backend: str) -> None:
    config = recipe(f"{backend}.extra={{a-new-flag: 3, another_one: true, quiet: false}}")
    words = after_program(launch(backend, config, seat()))
    assert words[-4:] == ["--a-new-flag", "3", "--another-one", "--no-quiet"]


def test_false_can_be_said_where_the_server_can_hear_it() -> None:
    known = flags_of("vllm")
    assert known.kind("enable_prefix_caching") == "both"
    on = recipe("vllm.no_enable_prefix_caching=false", "vllm.enable_prefix_caching=true")
    off = recipe("vllm.no_enable_prefix_caching=false", "vllm.enable_prefix_caching=false")
    assert "--enable-prefix-caching" in launch("vllm", on, seat()).argv
    assert "--no-enable-prefix-caching" in launch("vllm", off, seat()).argv


def test_log_probabilities_are_of_what_is_sampled_from() -> None:
    words = launch("vllm", recipe(), seat()).argv
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_a_tower_that_trains_has_no_cache_of_its_embeddings() -> None:
    assert launch("sglang", recipe(), seat()).env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in launch("sglang", recipe("actor.freeze_vision=true"), seat()).env


def test_the_recipe_is_planned_with_real_servers() -> None:
    made = plan(recipe("allocation_mode=vllm:d4p1t1+d4p1t1", "cluster.n_nodes=1", "cluster.n_gpus_per_node=8"))
    servers = [server for node in made.partitions[0].nodes for server in node.servers]
    assert [server.gpus for server in servers] == [[0], [1], [2], [3]]
    assert not [line for line in made.not_built if "servers" in line]


def test_gpus_of_a_server_start_where_its_partition_does() -> None:
    made = plan(recipe("allocation_mode=d4+vllm:d2t2", "cluster.n_nodes=1", "cluster.n_gpus_per_node=8"))
    part = made.partition("inference")
    assert part is not None
    assert [server.gpus for node in part.nodes for server in node.servers] == [[4, 5], [6, 7]]
