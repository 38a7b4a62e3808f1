"""A Job as the text of its sbatch script: one pure function, golden-tested.

What runs inside is launcher.slurm.batch (begin and end of an attempt, once a job) and submitit's task (launcher.slurm.
task, once a node). The script itself only starts the steps side by side and waits: bash 4.4 is enough.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from core.config import Config
from core.config.slurm import Ask
from launcher.node import orphan
from launcher.planning.layout import Plan
from launcher.run_dir import RunDir
from launcher.slurm.job import Component, Job, Size, job_of

REPOSITORY = str(Path(__file__).resolve().parents[2])
AGAIN_STATUS = 85
"""Of a daemon that the cluster stopped, and of launcher.slurm.batch when the run should go on in another attempt."""
NAMED = (
    "partition", "account", "qos", "time", "constraint", "reservation", "nodelist", "exclude", "licenses", "comment",
)  # fmt: skip
LINGER_SECS = 30
"""After the main component's end, how long the others may take."""
VERDICT_SECS = 240
"""After another component broke off: until then the lead has seen it (45 s; in preflight 180 s), torn down and written
why."""
ORPHAN_SECS = 10
"""After a daemon said that the lead is gone (its step may not end before Slurm has noticed, too), and after a step that
never started a daemon: nobody will write a verdict of it."""


def script_of(config: Config, plan: Plan, run_dir: RunDir) -> tuple[Job, str]:
    """What is sent, byte for byte, by this checkout and interpreter."""
    job = job_of(config, plan, run_dir, python=sys.executable, code=REPOSITORY)
    return job, sbatch_text(job)


def sbatch_text(job: Job) -> str:
    lines = ["#!/bin/bash"]
    if job.kind == "hetjob":
        for index, component in enumerate(job.components):
            lines += ["#SBATCH hetjob"] if index else []
            lines += [
                f"#SBATCH {word}"
                for word in _directives(job, component.size, component.ask, part="" if index == 0 else component.name)
            ]
    else:
        assert job.whole is not None
        lines += [f"#SBATCH {word}" for word in _directives(job, job.whole, job.components[0].ask)]
    return "\n".join([*lines, *_body(job)]) + "\n"


# --- what is asked for


def _directives(job: Job, size: Size, ask: Ask, *, part: str = "") -> Iterator[str]:
    """`part`: the name of a component that is not the leader."""
    leader = not part
    # of one name, the components of a chained job would wait for each other (singleton; seen)
    yield f"--job-name={job.name}{'-' if part else ''}{part}"
    yield from (f"--nodes={size.nodes}", "--ntasks-per-node=1")
    yield from _gpus(size, ask)
    if size.cpus:
        yield f"--cpus-per-task={size.cpus}"
    if size.mem:
        yield f"--mem={size.mem}"
    for name in (*NAMED, *(("mail_type", "mail_user") if leader else ())):
        value = getattr(ask, name)
        if value is not None:
            yield _flag(name, value)
    if ask.exclusive:
        yield "--exclusive"
    for name, value in ask.options.items():
        yield from (_flag(name, each) for each in (value if isinstance(value, list | tuple) else [value]) if each)
    yield f"--signal=USR2@{job.signal_lead_secs}"
    yield "--requeue" if job.requeue else "--no-requeue"
    if leader:
        if job.chain > 1:
            yield "--dependency=singleton"
        yield from (_flag("output", f"{job.run}/submitit/%j.out"), "--open-mode=append")


def _gpus(size: Size, ask: Ask) -> Iterator[str]:
    if not size.gpus or ask.gpu_form == "none":
        return
    kind = f"{ask.gpu_type}:" if ask.gpu_type else ""
    if ask.gpu_form == "gpus-per-node":
        yield f"--gpus-per-node={kind}{size.gpus}"
    else:
        yield f"--gres=gpu:{kind}{size.gpus}"


def _flag(name: str, value: object) -> str:
    name = name.replace("_", "-").lstrip("-")
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


# --- what runs


def _body(job: Job) -> Iterator[str]:
    yield from ("", "# one component per partition, one node daemon per node")
    yield f"run={shlex.quote(job.run)}"
    yield f"export PYTHONPATH={shlex.quote(job.code)}${{PYTHONPATH:+:$PYTHONPATH}}"
    yield "export PYTHONUNBUFFERED=1 SUBMITIT_EXECUTOR=components"
    common = _common_surroundings(job)
    yield from common
    yield from _node_lists(job)
    helper = shlex.join(_python(job, job.components[0], step=False))
    yield f'attempt=$({helper} -P -m launcher.slurm.batch start "$run") || exit 1'
    yield '[ -n "$attempt" ] || exit 0  # there is nothing left to do'
    yield "export VLM_RL_ATTEMPT=$attempt"
    yield from ("", "# each step reports its end here; Slurm's TERM and USR2 are the daemons' to answer")
    yield 'ends=$(mktemp -u) && mkfifo "$ends" && exec 9<>"$ends" && rm "$ends" || exit 1'
    yield "trap : TERM USR2"
    yield 'step() { trap : TERM USR2; local name=$1; shift; "$@"; echo "$name $?" >&9; }'
    for index, component in enumerate(job.components):
        step = _step(job, index, component)
        own = [line for line in _surroundings(component.ask) if line not in common]
        yield from ("", "\n".join(["(", *own, step, ") &"]) if own else f"{step} &")
    yield from _wait(job, helper)


def _surroundings(ask: Ask) -> Iterator[str]:
    if ask.modules:
        yield "module load " + shlex.join(ask.modules)
    yield from ask.setup or ()


def _common_surroundings(job: Job) -> list[str]:
    """What all components want is done once, the rest around the step of the component that wants it."""
    first, *others = [list(_surroundings(each.ask)) for each in job.components]
    return first if all(lines == first for lines in others) else []


def _node_lists(job: Job) -> Iterator[str]:
    names = {each.name: f"VLM_RL_{each.name.upper()}_NODES" for each in job.components}
    show = 'scontrol show hostnames "{}"'
    if job.kind == "hetjob":
        for index, name in enumerate(names.values()):
            yield f"export {name}=$({show.format(f'$SLURM_JOB_NODELIST_HET_GROUP_{index}')} | paste -sd,)"
        return
    yield f"hosts=($({show.format('$SLURM_JOB_NODELIST')}))"
    for each in job.components:
        yield f"export {names[each.name]}=" + ",".join(f"${{hosts[{host}]}}" for host in each.hosts)


def _python(job: Job, component: Component, *, step: bool) -> list[str]:
    """How Python is started, in the site's container where there is one."""
    ask, words = component.ask, []
    if ask.container == "pyxis" and not step:
        words = ["srun", *(["--het-group=0"] if job.kind == "hetjob" else [])]
        words += ["--nodes=1", "--ntasks=1", "--overlap", *_pyxis(ask)]
    elif ask.container in ("apptainer", "singularity"):
        binds = [word for mount in ask.container_mounts or () for word in ("--bind", mount)]
        words = [ask.container, "exec", *(["--nv"] if component.size.gpus else []), *binds, str(ask.container_image)]
    return [*words, job.python]


def _pyxis(ask: Ask) -> list[str]:
    mounts = ",".join(ask.container_mounts or ())
    return [f"--container-image={ask.container_image}", *([f"--container-mounts={mounts}"] if mounts else [])]


def _step(job: Job, index: int, component: Component) -> str:
    size, ask = component.size, component.ask
    srun = [f"--het-group={index}"] if job.kind == "hetjob" else ["--exact"]
    # 24.11 runs one node of two without --nodes, and 22.05 does not inherit --cpus-per-task (seen)
    srun += [f"--nodes={size.nodes}", f"--ntasks={size.nodes}", "--ntasks-per-node=1"]
    if job.kind == "one_job":
        srun += _gpus(size, ask)
        # without it the first step would hold the memory of the whole job
        srun += [f"--mem={size.mem or 0}"]
    if size.cpus:
        srun += [f"--cpus-per-task={size.cpus}"]
    # the daemons notice each other's end and say why; srun would only kill
    srun += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--unbuffered"]
    srun += [*(_pyxis(ask) if ask.container == "pyxis" else []), *(ask.srun_args or ())]
    where = f' --nodelist="$VLM_RL_{component.name.upper()}_NODES"' if job.kind == "one_job" else ""
    output = f' --output="$run/submitit/%j_{component.name}_%t.out"'
    environment = [f"VLM_RL_COMPONENT={component.name}", f"VLM_RL_HET_GROUP={index}"]
    environment += [f"{key}={value}" for key, value in ask.env.items()]
    task = shlex.join([*_python(job, component, step=True), "-P", "-u", "-m", "submitit.core._submit"])
    return (
        f"step {component.name} env {shlex.join(environment)} \\\n"
        f"  srun {shlex.join(srun)}{where}{output} \\\n"
        f'  {task} "$run/submitit"'
    )


def _wait(job: Job, helper: str) -> Iterator[str]:
    yield f"""
left={len(job.components)} status=() deadline=0
while [ "$left" -gt 0 ] && {{ [ "$deadline" = 0 ] || [ "$SECONDS" -lt "$deadline" ]; }}; do
  read -r -t 5 name code <&9 || continue
  left=$((left - 1)) status+=("$name=$code")
  if [ "$name" = {job.main} ]; then deadline=$((SECONDS + {LINGER_SECS}))
  elif [ "$code" = {orphan.STATUS} ] || [ ! -e "$run/logs/$attempt/$name-0/daemon.log" ]; then
    deadline=$((SECONDS + {ORPHAN_SECS}))
  elif [ "$code" != 0 ] && [ "$deadline" = 0 ]; then deadline=$((SECONDS + {VERDICT_SECS})); fi
done
{helper} -P -m launcher.slurm.batch finish "$run" "$attempt" "${{status[@]}}"
code=$?
# one requeue for the whole job, unless Slurm is ending it; then wait to be killed: an early exit would end the job
if [ "$code" = {AGAIN_STATUS} ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T | head -n 1)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID" && echo "job $SLURM_JOB_ID is requeued" >&2 && sleep 120
  # an srun that still waits for a lost node would, some seconds on, end the step of the same number of the next attempt
  pkill -KILL --session 0 -x srun
fi
exit "$code\""""
