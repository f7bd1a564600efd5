"""The table of launchers against the launchers themselves, and against what others were seen to set."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.parallel.world import World, find, first_host

# each process says what it found, and the sum of all ranks + 1 as they add it up together
PROGRAM = """
import json
import torch, torch.distributed as dist
from gradus.parallel import world
here = world.find()
world.join(here, timeout=60)
total = torch.tensor(here.rank + 1.0)
if here.size > 1:
    dist.all_reduce(total)
print(json.dumps([here.rank, here.size, here.local_rank, here.local_size, here.launcher, here.port, total.item()]) + "\\n", end="", flush=True)
world.leave()
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(command: list) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k not in NAMES} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([str(c) for c in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> list[list]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))


@pytest.mark.slow
def test_torchrun(program):
    """Rank, size, and all ranks added up together."""
    found = finish(start([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]))
    assert [f[:5] for f in found] == [[r, 2, r, 2, "torchrun"] for r in range(2)]
    assert [f[6] for f in found] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("launcher", "command"), [("Open MPI", ["mpirun", "--allow-run-as-root", "--oversubscribe"]), ("Hydra", ["mpiexec.hydra"])], ids=["open-mpi", "mpich"]
)
def test_two_jobs_at_once(program, launcher, command):
    """Each job meets itself, at a port of its own."""
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]}: apt-get install openmpi-bin (or mpich)")
    jobs = [start([*command, "-n", "2", sys.executable, program]) for _ in range(2)]
    ports = set()
    for found in map(finish, jobs):
        assert [f[:5] for f in found] == [[r, 2, r, 2, launcher] for r in range(2)]
        assert [f[6] for f in found] == [3.0, 3.0]
        assert found[0][5] == found[1][5]
        ports.add(found[0][5])
    assert len(ports) == 2


def test_a_port_in_use_is_one_line(program):
    """What already listens there is told, with what to do."""
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        environment = dict(zip(NAMES, ["0", "2", "0", "2", "127.0.0.1", str(s.getsockname()[1])]))
        done = subprocess.run([sys.executable, program], env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert "is in use. Start again, with MASTER_PORT set to a free one." in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------- recorded

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "HYDI_CONTROL_FD": "7", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "2"}
STEP = {
    **BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip


def test_mpich():
    """Recorded from mpiexec.hydra 4.0.2 with two processes on one host."""
    here = find(MPICH)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.launcher, here.address) == (1, 2, 1, 2, "Hydra", "127.0.0.1")
    assert here.port == find({**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "6"}).port


def test_slurm():
    """Recorded from srun of Slurm 22.05 on two nodes. Rank 0 is on the step's first node, wherever srun itself was started."""
    here = find(STEP)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.launcher, here.address) == (3, 4, 1, 2, "Slurm", "n1")
    assert here.port == find({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).port
    assert here.port != find({**STEP, "SLURM_STEP_ID": "1"}).port != find({**STEP, "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1"}).port


def test_slurm_with_uneven_nodes():
    """2(x3),1: the last of four nodes has one task."""
    uneven = {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[07-09],login1"}
    assert [find({**uneven, "SLURM_NODEID": str(n)}).local_size for n in range(4)] == [2, 2, 2, 1]
    assert find(uneven).address == "gpu07"


def test_a_replica_that_is_a_job_of_its_own():
    """Under a torchrun of its own, which has one process, or as many as the replica."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    here = find({**torchrun, "GRADUS_REPLICA": "2", "GRADUS_REPLICAS": "4", "GRADUS_STORE": "node1:29400"})
    assert here == World(2, 4, 0, 1, "replicas", "node1", 29400)
    torchrun |= {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    here = find({**torchrun, "GRADUS_REPLICA": "2", "GRADUS_REPLICAS": "4", "GRADUS_STORE": "node1:29400"})
    assert here == World(19, 32, 1, 2, "replicas", "node1", 29400)


def test_a_batch_script_is_alone():
    """Without srun there is one process, though the job has four tasks."""
    assert find(BATCH) == World()


def test_srun_with_pmi2_is_slurm():
    """It sets PMI_RANK and PMI_SIZE, but only Slurm's variables tell the rank on the node."""
    assert find({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13", "PMI_JOBID": "2.0"}).local_rank == 1


def test_the_nearest_launcher_counts():
    """torchrun in a Slurm step, and mpirun whose daemons Slurm started."""
    torchrun = dict(zip(NAMES, ["5", "8", "1", "4", "n1", "29400"]))
    assert find({**STEP, **torchrun}) == World(5, 8, 1, 4, "torchrun", "n1", 29400)
    assert find({**STEP, **MPICH}).launcher == "Hydra"


def test_ports_lie_below_those_that_linux_gives_out():
    """And 200 jobs in a row have nearly as many ports."""
    ports = {find({**STEP, "SLURM_JOB_ID": str(n)}).port for n in range(1000, 1200)}
    assert len(ports) > 190
    assert all(20_000 <= p < 32_768 for p in ports)


def test_a_port_may_be_given():
    here = find({**STEP, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "29501"})
    assert (here.address, here.port) == ("elsewhere", 29501)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but not LOCAL_RANK. Set it too, or unset RANK."),
        ({**MPICH, "PMI_RANK": "2"}, "Hydra: its environment is inconsistent (PMI_RANK=2 is not below PMI_SIZE=2). Start again, or unset PMI_RANK."),
        ({**MPICH, "PMI_SIZE": "two"}, "Hydra: its environment is inconsistent (invalid literal for int() with base 10: 'two'). Start again, or unset PMI_RANK."),
        ({**MPICH, "PMI_SIZE": "4"}, "Hydra: 4 processes on several hosts, and the host of rank 0 is not known. Name it with -genv MASTER_ADDR HOST."),
        ({"GRADUS_REPLICA": "0", "GRADUS_REPLICAS": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
         "replicas: its environment is inconsistent (GRADUS_STORE is to be HOST:PORT, where python -m gradus.parallel.quorum PORT runs)."
         " Start again, or unset GRADUS_REPLICA."),
        ({**STEP, "MASTER_ADDR": "n1", "MASTER_PORT": "x"}, "Slurm: its environment is inconsistent (invalid literal for int() with base 10: 'x'). Start again, or unset SLURM_PROCID."),
    ],
)  # fmt: skip
def test_half_an_environment(environment, told):
    with pytest.raises(UserError) as e:
        find(environment)
    assert str(e.value) == told


def test_several_hosts_agree_on_a_port():
    """Hydra's processes on different hosts have nothing in common but what they were given."""
    assert find({**MPICH, "PMI_SIZE": "4", "MASTER_ADDR": "n1"}).port == 20_000


# ---------------------------------------------------------------- Slurm's lists

word = st.text("abcnx", min_size=1, max_size=3)
number = st.tuples(st.integers(0, 120), st.integers(0, 3), st.integers(1, 3)).map(lambda t: (f"{t[0]:0{t[2]}d}", f"{t[0] + t[1]:0{t[2]}d}"))
piece = st.one_of(number.map(lambda ab: ab[0]), number.map("-".join))
bracket = st.lists(piece, min_size=1, max_size=3).map(lambda p: "[" + ",".join(p) + "]")
host = st.tuples(word, st.one_of(st.just(""), bracket, st.tuples(bracket, word, bracket).map("".join))).map("".join)


@settings(max_examples=60)
@given(st.lists(host, min_size=1, max_size=3).map(",".join))
def test_first_host_is_scontrols(tmp_path_factory, nodes):
    if not shutil.which("scontrol"):
        pytest.skip("no scontrol: apt-get install slurm-wlm")
    conf = tmp_path_factory.getbasetemp() / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\n")
    environment = os.environ | {"SLURM_CONF": str(conf)}
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert first_host(nodes) == done.stdout.split()[0]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("a,b", "a"), ("gpu[07-09,11],login1", "gpu07"), ("login1,gpu[1-2]", "login1"), ("r[1-2]n[03-04]-ib,x", "r1n03-ib"), ("10.0.0.[4-5]", "10.0.0.4")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_one_process_needs_no_meeting():
    assert find({}) == World()
    assert find({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).port is None
    assert not torch.distributed.is_initialized()
