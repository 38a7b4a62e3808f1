"""The text of slurm.conf, gres.conf and slurmdbd.conf of a test cluster. Values to text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HIGH, LOW = "high", "main"


@dataclass(frozen=True)
class Shape:
    root: Path
    host: str
    nodes: int = 4
    gpus: int = 8
    cpus: int = 128
    memory_mb: int = 1_000_000
    accounting: bool = True
    netns: bool = False
    slot: int = 0
    """Which of this machine's clusters: each slot has ports, names and addresses of its own."""

    @property
    def prefix(self) -> str:
        return f"c{self.slot}n"

    @property
    def base_port(self) -> int:
        return 17800 + 100 * self.slot

    @property
    def subnet(self) -> str:
        return f"10.78.{self.slot}"

    def nodes_of(self, numbers: str) -> str:
        """As Slurm writes them: of "1-4", `c0n[1-4]`."""
        return f"{self.prefix}[{numbers}]"

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}{index}" for index in range(1, self.nodes + 1)]

    @property
    def controller_address(self) -> str:
        return f"{self.subnet}.254" if self.netns else "127.0.0.1"

    @property
    def controller_port(self) -> int:
        return self.base_port + 17

    @property
    def dbd_port(self) -> int:
        return self.base_port + 19

    @property
    def sql_port(self) -> int:
        return self.base_port + 20

    def address(self, index: int) -> str:
        return f"{self.subnet}.{index}" if self.netns else f"127.0.{1 + self.slot}.{index}"

    def port(self, index: int) -> int:
        return self.base_port if self.netns else self.base_port + index


def slurm_conf(shape: Shape) -> str:
    root = shape.root
    accounting = (
        f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={shape.dbd_port}
AccountingStoragePass={root}/munge/sock
AccountingStorageTRES=gres/gpu"""
        if shape.accounting
        else "AccountingStorageType=accounting_storage/none"
    )
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={shape.address(index)} Port={shape.port(index)} "
        f"CPUs={shape.cpus} RealMemory={shape.memory_mb} Gres=gpu:{shape.gpus} Feature=fake"
        for index, name in enumerate(shape.names, 1)
    )
    return f"""ClusterName=fake
SlurmctldHost={shape.host}({shape.controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/sock,cred_expire=5
SlurmctldPort={shape.controller_port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
SlurmdTimeout=120
SlurmctldTimeout=15
CompleteWait=0
MinJobAge=600
{accounting}
{nodes}
PartitionName={LOW} Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName={HIGH} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def gres_conf(shape: Shape) -> str:
    devices = f"{shape.root}/dev/nvidia[0-{shape.gpus - 1}]"
    return f"AutoDetect=off\nNodeName={shape.prefix}[1-{shape.nodes}] Name=gpu File={devices}\n"


def slurmdbd_conf(shape: Shape) -> str:
    root = shape.root
    return f"""AuthType=auth/munge
AuthInfo=socket={root}/munge/sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={shape.dbd_port}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={shape.sql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
