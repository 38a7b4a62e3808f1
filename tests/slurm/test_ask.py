"""What is asked of Slurm: the section, scheduling_spec below it, contradictions, the shape and its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Config, ConfigError
from core.config.slurm import Ask
from launcher.plan import PlanError, plan
from launcher.slurm.ask import asked, gibibytes, minutes
from tests.slurm.conftest import job_for, plan_of

Recipe = Callable[..., Config]


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 90), ("1:30", 1.5), ("1:30:00", 90), ("1-12", 2160), ("2-0:30", 2910), ("1-0:0:30", 1440.5)],
)
def test_times_are_slurms_own_forms(time: str, expected: float) -> None:
    assert minutes(time) == expected


def test_no_limit_and_sizes() -> None:
    assert minutes("UNLIMITED") is None
    assert [gibibytes(each) for each in ("1024", "2G", "1T", "512M")] == [1, 2, 1024, 0.5]


@given(days=st.integers(0, 30), hours=st.integers(0, 23), mins=st.integers(0, 59), secs=st.integers(0, 59))
def test_any_time_is_read_as_slurm_reads_it(days: int, hours: int, mins: int, secs: int) -> None:
    total = days * 1440 + hours * 60 + mins + secs / 60
    assert minutes(f"{days}-{hours}:{mins}:{secs}") == pytest.approx(total)
    assert minutes(f"{hours}:{mins:02}:{secs:02}") == pytest.approx(total - days * 1440)


def test_scheduling_spec_means_what_it_says_and_slurm_wins(recipe: Recipe) -> None:
    fields = "cpu: 6, mem: 20, nodelist: 'n[1-4]', exclude: n9, image: /i.sif, mount: '/a:/b,/c:/d'"
    spec = f"actor.scheduling_spec=[{{{fields}}}]"
    ask = asked(recipe(spec), "training")
    assert (ask.cpus_per_gpu, ask.mem_per_gpu, ask.nodelist, ask.exclude) == (6, "20G", "n[1-4]", "n9")
    assert (ask.container, ask.container_image, ask.container_mounts) == ("apptainer", "/i.sif", ("/a:/b", "/c:/d"))
    wins = asked(
        recipe(spec, "slurm.training.cpus_per_node=12", "slurm.exclude=n3", "slurm.mem_per_gpu=30G"), "training"
    )
    assert (wins.cpus_per_gpu, wins.cpus_per_node, wins.exclude, wins.mem_per_gpu) == (None, 12, "n3", "30G")


def test_areals_default_image_is_not_taken_for_a_wish(recipe: Recipe) -> None:
    ask = asked(recipe(), "training")
    assert ask.container is None and ask.container_image is None and ask.srun_args is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["slurm.mem_per_gpu=4G", "slurm.mem_per_node=8G"], "mem_per_gpu are both given"),
        (["slurm.cpus_per_gpu=4", "slurm.cpus_per_node=8"], "cpus_per_gpu are both given"),
        (["slurm.container_image=/x.sqsh"], "who starts container_image"),
        (["slurm.container=pyxis"], "must be set when container is pyxis"),
        (["slurm.gpu_form=none", "slurm.gpu_type=h100"], "cannot be asked for"),
        (["slurm.time=1", "slurm.signal_lead_secs=90"], "is before its start"),
        (["slurm.nodelist=n1,n2", "slurm.exclude=n2"], "n2 is in nodelist too"),
        (["slurm.training.partition=a", "slurm.inference.partition=b"], "steps of one job"),
        (["slurm.training.options.switches=1"], "steps of one job"),
        (["slurm.shape=hetjob"], "a hetjob of this allocation takes 2 nodes, cluster.n_nodes is 1"),
        (["slurm.chain=2"], "set recover.mode=auto"),
    ],
)
def test_contradictions_are_refused_by_name(recipe: Recipe, overrides: list[str], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(recipe("cluster.n_nodes=1", *overrides))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "option", ["nodes=3", "ntasks-per-node=2", "dependency=x", "output=/x", "partition=gpu", "signal=B"]
)
def test_an_option_that_is_written_already_is_refused(recipe: Recipe, option: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.options"):
        recipe(f"slurm.options.{option}")


def test_every_named_field_of_a_job_is_there() -> None:
    """AReaL, lingua users: no way to name partition, account, qos, time, constraint, reservation, modules, image."""
    named = """partition account qos time constraint reservation nodelist exclude gpu_type gpu_form cpus_per_gpu
        cpus_per_node mem_per_gpu mem_per_node exclusive licenses mail_type mail_user comment modules setup env
        container container_image container_mounts srun_args options"""
    assert set(named.split()) == set(Ask.model_fields)


@pytest.mark.parametrize(
    ("nodes", "allocation", "kind", "why"),
    [
        (1, "vllm:d4+d4", "one_job", "more than cluster.n_nodes=1"),
        (2, "vllm:d8+d8", "hetjob", "1 + 1 of cluster.n_nodes=2"),
        (2, "vllm:d2+d2", "hetjob", "1 + 1 of cluster.n_nodes=2"),
        (1, "vllm:d2+d2", "one_job", "more than cluster.n_nodes=1"),
    ],
)
def test_the_shape_and_why(recipe: Recipe, nodes: int, allocation: str, kind: str, why: str) -> None:
    planned = plan_of(recipe(f"cluster.n_nodes={nodes}", f"allocation_mode={allocation}"))
    assert planned.shape == kind and why in planned.shape_why
    for partition in planned.partitions:
        for node in partition.nodes:
            assert node.gpus == list(range(len(node.gpus)))  # each sees its own GPUs, counted from 0
    hosts = [{node.host for node in partition.nodes} for partition in planned.partitions]
    assert bool(hosts[0] & hosts[1]) == (kind == "one_job")


def test_one_job_for_a_site_that_forbids_hetjobs(recipe: Recipe) -> None:
    job = job_for(recipe("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8", "slurm.shape=one_job"))
    assert job.kind == "one_job" and job.whole is not None and job.whole.nodes == 2
    assert [component.hosts for component in job.components] == [(0,), (1,)]


dims = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)  # a plan takes as long as this machine is busy
@given(serving=dims, training=dims, nodes=st.sampled_from([1, 2, 3, 4]), per_node=st.sampled_from([4, 8]))
def test_what_is_asked_for_is_what_is_planned(serving: int, training: int, nodes: int, per_node: int) -> None:
    """On no node more than it has; together exactly what the partitions need."""
    config = LOADED.model_copy(
        update={
            "allocation_mode": f"vllm:d{serving}+d{training}",
            "cluster": LOADED.cluster.model_copy(update={"n_nodes": nodes, "n_gpus_per_node": per_node}),
        }
    )
    planned = plan_of(config)
    if not planned.partitions:
        return
    job = job_for(config)
    assert [each.size.nodes * each.size.gpus for each in job.components] == [serving, training]
    if job.whole is not None:
        assert job.whole.gpus <= per_node and job.whole.nodes <= nodes
    else:
        assert sum(each.size.nodes for each in job.components) <= nodes


LOADED: Config


@pytest.fixture(autouse=True, scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    from core.config import load
    from tests.slurm.conftest import RECIPE

    global LOADED
    words = [f"paths.cache={tmp_path_factory.mktemp('cache')}", "scheduler.type=slurm"]
    LOADED = load(RECIPE, words, on_warning=lambda line: None)
