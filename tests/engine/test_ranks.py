"""Two gloo ranks under FSDP2 against one process: loss, norm, logprobs, every gradient, publishing, checkpoints."""

from __future__ import annotations

import shutil

import pytest
import torch

from core.engine import checkpoint as checkpoints
from tests.engine.ranks import ADAM_STEPS, STEPS, small_batch
from tests.engine.scene import ADAM, alone, make_batch, make_engine, policy_step, whole
from tests.engine.test_train_engine import far

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_two_ranks_is_the_step_of_one_process(two_ranks, checkpoint, name):
    _, found = two_ranks
    settings, _, images = STEPS[name]
    batch = make_batch(checkpoint, images=images)
    engine = make_engine(checkpoint, alone(), freeze_vision=settings.get("freeze_vision", False))
    before = whole(engine)
    step = policy_step(engine, batch)
    for rank in found:
        assert rank[name]["loss"] == pytest.approx(step.update.loss, rel=1e-10)
        assert rank[name]["grad_norm"] == pytest.approx(step.update.grad_norm, rel=1e-9)
        assert rank[name]["prox_diff_max"] <= 1e-12
        for parameter, after in whole(engine).items():
            assert far(rank[name]["gradients"][parameter], before[parameter] - after) < 1e-9, parameter
    logp = found[0][name]["logp"] | found[1][name]["logp"]
    assert logp.keys() == step.logp.keys()
    assert not found[0][name]["logp"].keys() & found[1][name]["logp"].keys()
    assert all(far(logp[sample], step.logp[sample]) < 1e-10 for sample in logp)


def test_a_hundred_small_adam_steps_move_float32_masters_as_float64_does(two_ranks, checkpoint):
    """bf16 compute over float32 masters: with bf16 masters every one of these updates would be rounded away."""
    _, found = two_ranks
    engine = make_engine(checkpoint, alone(), optimizer=ADAM)
    batch = small_batch(checkpoint)
    before = whole(engine)
    for _ in range(ADAM_STEPS):
        policy_step(engine, batch, lr=ADAM.lr, recompute=False)
    wanted = torch.cat([(after - before[name]).flatten() for name, after in whole(engine).items()])
    moved = torch.cat([found[0]["adam"][name].double().flatten() for name in before])
    assert moved.norm().item() == pytest.approx(wanted.norm().item(), rel=0.01)
    # element by element bf16 gradients differ in sign where they are near zero, and Adam takes the sign
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.98


def test_published_tensors_are_whole_each_from_one_rank_and_are_the_masters(two_ranks, checkpoint):
    _, found = two_ranks
    for case in found[0]["publish"]:
        shares = [rank["publish"][case][0] for rank in found]
        masters = found[0]["publish"][case][1]
        assert not shares[0].keys() & shares[1].keys()
        assert shares[0].keys() | shares[1].keys() == masters.keys()
        assert min(sum(t.numel() for t in share.values()) for share in shares) > 0.3 * sum(
            t.numel() for t in masters.values()
        )
        dtype = getattr(torch, case.split()[1])
        for share in shares:
            for name, tensor in share.items():
                assert tensor.dtype == dtype and tensor.is_contiguous()
                assert torch.equal(tensor, masters[name].to(dtype)), name


def test_a_checkpoint_of_two_ranks_goes_on_as_if_nothing_had_happened(two_ranks):
    _, found = two_ranks
    for rank in found:
        assert rank["checkpoint"]["state"]["data"] == {"place": 5}
        for name, tensor in rank["checkpoint"]["went on"].items():
            assert torch.equal(rank["checkpoint"]["resumed"][name], tensor), name


def test_a_checkpoint_of_two_ranks_loads_bit_equal_into_one_process(two_ranks, checkpoint, tmp_path):
    out, found = two_ranks
    root = shutil.copytree(out / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    engine = make_engine(checkpoint, alone(), optimizer=ADAM)
    loaded = checkpoints.load(root, engine, gather=lambda value: [value])
    assert loaded.step == 2 and loaded.warnings == []
    assert set(engine.optimizer.updates.values()) == {2}
    state = {**whole(engine), **engine.optimizer.state()}
    assert state.keys() == found[0]["checkpoint"]["saved"].keys()
    for name, tensor in found[0]["checkpoint"]["saved"].items():
        assert torch.equal(state[name], tensor), name


def test_shards_of_two_ranks_swapped_with_each_other_are_not_loaded(two_ranks, checkpoint, tmp_path):
    out, _ = two_ranks
    root = shutil.copytree(out / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    one, other = sorted((root / "step-2").glob("*.distcp"))
    mine = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(mine)
    engine = make_engine(checkpoint, alone(), optimizer=ADAM)
    before = whole(engine)
    with pytest.raises(checkpoints.CheckpointError, match=r"distcp is not what was written"):
        checkpoints.load(root, engine, gather=lambda value: [value])
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(engine).items())
