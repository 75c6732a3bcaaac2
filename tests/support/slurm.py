"""A Slurm of its own on this host: munge, slurmctld and two slurmd, in a PID namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from needs import needs
from ports import free_port
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
NODES = ("n1", "n2")

_CONFIG = """\
ClusterName=warmd
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
KillWait=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=8
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""

_START = """\
munged --foreground --force --key-file=munge.key --socket=$PWD/munge.socket \
  --pid-file=$PWD/munged.pid --log-file=$PWD/munged.log --seed-file=$PWD/munged.seed &
while [ ! -S munge.socket ]; do sleep 0.05; done
slurmctld -D -i &
for node in n1 n2; do slurmd -D -N $node & done
wait
"""


class Slurm:
    """A cluster of two nodes on this host, as root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        controller, first, second = (free_port() for _ in range(3))
        config = folder / "slurm.conf"
        config.write_text(
            _CONFIG.format(folder=folder, controller=controller, first=first, second=second)
        )
        self.environ = {**os.environ, "SLURM_CONF": str(config)}
        with open(folder / "processes.log", "ab") as log:
            # A namespace of their own: all of them, and all jobs, end with its first process.
            self._process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _START],
                cwd=folder,
                env=self.environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        wait_until(lambda: self._states() == dict.fromkeys(NODES, "idle"), timeout_s=60)

    def run(self, *command: str, **environ: str) -> str:
        """Run a command of Slurm; return what it prints."""
        done = subprocess.run(
            command, env={**self.environ, **environ}, capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *options: str, **environ: str) -> str:
        """Submit a script; return the id of the job."""
        found = self.run("sbatch", "--parsable", *options, str(script), **environ)
        return found.strip()

    def state(self, job: str) -> tuple[str, str]:
        """The state of a job and its node; both empty once Slurm has forgotten it."""
        found = self.run("squeue", "--noheader", "--states=all", "-o", "%i %T %N").split("\n")
        for line in found:
            number, _, rest = line.partition(" ")
            if number == job:
                state, _, node = rest.partition(" ")
                return state, node
        return "", ""

    def _states(self) -> dict[str, str]:
        assert self._process.poll() is None, (self.folder / "processes.log").read_text()
        with suppress(AssertionError):  # slurmctld does not answer yet
            lines = self.run("sinfo", "-N", "--noheader", "-p", "low", "-o", "%N %T").split("\n")
            return {name: state for name, _, state in (x.partition(" ") for x in lines) if name}
        return {}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        time.sleep(0.2)  # the namespace's processes are being reaped


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster that ends with the test."""
    for program in PROGRAMS:
        needs(shutil.which(program), f"{program} (Debian: slurmctld slurmd slurm-client munge)")
    needs(os.getuid() == 0, "root, for slurmd and a PID namespace")
    made = Slurm(folder)
    try:
        yield made
    finally:
        made.close()
