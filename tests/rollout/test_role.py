"""The rollout process as the daemon starts it: registers, works, is killed and goes on, ends at SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from core.config import load
from core.rl.trajectory import decode_samples
from core.rpc.client import AsyncClient
from launcher.plan import plan
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from launcher.run_dir import RunDir
from tests.rollout.stub_run import CONFIG, StubDaemon, StubData
from tests.rollout.stub_server import StubServer
from tests.support.rows import stand_in_rows

REPOSITORY = Path(__file__).resolve().parents[2]
# the stub's servers and rows know these ids as placeholders and stop, whatever the checkpoint says
LAUNCH = """
import sys, tests.rollout.stub_run as stub
import launcher.roles.rollout as role
role.Tokenizer = lambda path: stub.StubTokenizer()
code = role.main(sys.argv[1:])
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


def run_dir_in(root: Path) -> RunDir:
    write_checkpoint(root, TinyModel())
    run_dir = RunDir(root / "run")
    run_dir.create()
    stand_in_rows(root)
    text = CONFIG.format(root=root)
    run_dir.config.write_text(text)
    config = load(run_dir.config, [])
    run_dir.config.write_text(config.dump_yaml())
    run_dir.plan.write_text(plan(config, device="cpu").to_json())
    return run_dir


@asynccontextmanager
async def process(run_dir: RunDir, daemon: StubDaemon) -> AsyncIterator[tuple[asyncio.subprocess.Process, AsyncClient]]:
    daemon.registered.clear()
    command = ["-P", "-c", LAUNCH, "--run-dir", str(run_dir.root), "--attempt", "1", "--partition", "training"]
    command += ["--node", "0", "--name", "rollout", "--daemon", daemon.service.url, "--local", str(run_dir.root)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, cwd=run_dir.root.parent
    )
    try:
        while "rollout" not in daemon.registered:
            assert child.returncode is None, "it ended before it registered"
            await asyncio.sleep(0.02)
        client = AsyncClient(daemon.registered["rollout"], run_dir.read_token())
        yield child, client
        await client.close()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def test_the_process_goes_on_after_a_kill_and_ends_cleanly_at_sigterm(tmp_path: Path) -> None:
    async def go() -> None:
        run_dir = run_dir_in(tmp_path)
        token = run_dir.read_token()
        server = StubServer("server-0", token=token)
        await server.start()
        data, daemon = StubData(token=token), StubDaemon([server], token=token)
        daemon.data_url = await data.service.start()
        await daemon.service.start()
        publish = {"version": 0, "generation": 0, "name": "v000000-r0", "path": "/w", "digest": "d", "step": 0}
        async with process(run_dir, daemon) as (child, client):
            await client.post("/publish", {**publish, "optimizer_done": 0.0})
            assert (await client.get("/batches/2", wait=20, timeout=30))["ready"]
            child.send_signal(signal.SIGUSR1)  # stacks go to the log, the work goes on
            before = await client.get_bytes("/batches/1/samples", indices="0,1,2,3")
            child.kill()
        async with process(run_dir, daemon) as (child, client):
            assert (await client.get("/batches/2", wait=20, timeout=30))["ready"], "without being told again"
            after = await client.get_bytes("/batches/1/samples", indices="0,1,2,3")
            first, second = ([sample.text for sample in decode_samples(body)[0]] for body in (before, after))
            assert first == second
            child.terminate()
            assert await asyncio.wait_for(child.wait(), 10) == 0
        await server.die()
        await daemon.service.stop()
        await data.service.stop()

    asyncio.run(asyncio.wait_for(go(), 100))
