"""Which launcher is at work, from environment variables alone; and two real processes that join."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar import distributed
from jaxpar.distributed import PORTS, Launch, detect, first_node

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCHRUN = {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_ID": "777",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_ID": "0",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "trainer-0.svc:1234"}
JOBSET = {"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "4", "JOBSET_NAME": "llama", "REPLICATED_JOB_NAME": "workers"}
SLURM_PORT = PORTS[777]


@pytest.mark.parametrize(
    "environ, launch",
    [
        ({}, None),
        ({"HOME": "/root", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500"}, None),
        ({"SLURM_JOB_ID": "777", "SLURM_NTASKS": "16"}, None),  # a shell of salloc, outside any step
        ({"RANK": "", "WORLD_SIZE": " "}, None),
        (EXPLICIT, Launch("10.0.0.1:1234", 4, 3, None, "JAX_PROCESS_ID")),
        (EXPLICIT | {"JAX_COORDINATOR_ADDRESS": "head"}, Launch(f"head:{PORTS[0]}", 4, 3, None, "JAX_PROCESS_ID")),
        (
            EXPLICIT | {"JAX_COORDINATOR_ADDRESS": "head", "JAX_COORDINATOR_PORT": "5", "JAX_LOCAL_DEVICE_IDS": "0, 2"},
            Launch("head:5", 4, 3, (0, 2), "JAX_PROCESS_ID"),
        ),
        (TORCHRUN, Launch("10.0.0.2:29500", 16, 9, (1,), "RANK")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, Launch("10.0.0.2:29501", 16, 9, (1,), "RANK")),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Launch("10.0.0.2:29500", 16, 9, None, "RANK")),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "5"}, Launch("10.0.0.2:29500", 16, 9, None, "RANK")),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5"}, Launch("10.0.0.2:29500", 16, 9, (1,), "RANK")),
        (OPEN_MPI, Launch(f"localhost:{PORTS[0]}", 4, 2, (2,), "OMPI_COMM_WORLD_RANK")),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "head:9"}, Launch("head:9", 4, 2, (2,), "OMPI_COMM_WORLD_RANK")),
        (
            OPEN_MPI | {"MASTER_ADDR": "head", "MASTER_PORT": "9", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            Launch("head:9", 4, 2, None, "OMPI_COMM_WORLD_RANK"),
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_JOB_ID": "777", "SLURM_JOB_NODELIST": "a1,a2"},
            Launch(f"a1:{SLURM_PORT}", 8, 2, (2,), "OMPI_COMM_WORLD_RANK"),
        ),
        (TORCHRUN | {"MASTER_ADDR": "fd00::7"}, Launch("[fd00::7]:29500", 16, 9, (1,), "RANK")),
        (SLURM, Launch(f"gpu007:{SLURM_PORT}", 16, 11, (3,), "SLURM_PROCID")),
        (SLURM | {"SLURM_STEP_ID": "2"}, Launch(f"gpu007:{SLURM_PORT + 2}", 16, 11, (3,), "SLURM_PROCID")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "12"}, Launch(f"gpu007:{SLURM_PORT}", 12, 11, (3,), "SLURM_PROCID")),
        (
            SLURM | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x16)"},
            Launch(f"gpu007:{SLURM_PORT}", 16, 11, None, "SLURM_PROCID"),
        ),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, Launch(f"gpu007:{SLURM_PORT}", 16, 11, None, "SLURM_PROCID")),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "head:9"}, Launch("head:9", 16, 11, (3,), "SLURM_PROCID")),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch("localhost:0", 1, 0, None, "SLURM_PROCID")),
        (KUBERNETES, Launch("trainer-0.svc:1234", 4, 1, None, "JOB_COMPLETION_INDEX")),
        (JOBSET, Launch(f"llama-workers-0-0.llama:{PORTS[0]}", 4, 1, None, "JOB_COMPLETION_INDEX")),
        ({"JOB_COMPLETION_INDEX": "7", "JAX_NUM_PROCESSES": "1"}, Launch("localhost:0", 1, 0, None, "JOB_COMPLETION_INDEX")),
    ],
)
def test_detect(environ, launch):
    assert detect(environ) == launch


def test_precedence_innermost_launcher_first():
    order = [EXPLICIT, TORCHRUN, OPEN_MPI, SLURM, JOBSET]
    sources = ["JAX_PROCESS_ID", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"]
    without_jax = {name: value for name, value in JOBSET.items() if name != "JAX_NUM_PROCESSES"}
    for first in range(5):
        environ = {}
        for variables in order[first:]:
            environ = (without_jax if variables is JOBSET and first < 4 else variables) | environ
        assert detect(environ).source == sources[first]


@pytest.mark.parametrize(
    "environ, drop, message",
    [
        (EXPLICIT, "JAX_COORDINATOR_ADDRESS", "^JAX_COORDINATOR_ADDRESS: not set, although"),
        (EXPLICIT, "JAX_NUM_PROCESSES", "^JAX_NUM_PROCESSES: not set"),
        (EXPLICIT, "JAX_PROCESS_ID", "^JAX_PROCESS_ID: not set"),
        (TORCHRUN, "MASTER_ADDR", "^MASTER_ADDR: not set, although RANK or WORLD_SIZE is"),
        (TORCHRUN, "MASTER_PORT", "^MASTER_PORT: not set"),
        (TORCHRUN, "WORLD_SIZE", "^WORLD_SIZE: not set"),
        (TORCHRUN, "RANK", "^RANK: not set"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "^OMPI_COMM_WORLD_RANK: not set"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "^JAX_COORDINATOR_ADDRESS: not set, and Open MPI"),
        (SLURM, "SLURM_NTASKS", "^SLURM_NTASKS: not set, although SLURM_PROCID is"),
        (SLURM, "SLURM_LOCALID", "^SLURM_LOCALID: not set"),
        (SLURM, "SLURM_JOB_ID", "^SLURM_JOB_ID: not set"),
        (SLURM, "SLURM_STEP_NODELIST", "^SLURM_STEP_NODELIST: not set"),
        (KUBERNETES, "JAX_NUM_PROCESSES", "^JAX_NUM_PROCESSES: not set, although JOB_COMPLETION_INDEX is; set it to the completions"),
        (KUBERNETES, "JAX_COORDINATOR_ADDRESS", "^JAX_COORDINATOR_ADDRESS: not set"),
        (JOBSET, "REPLICATED_JOB_NAME", "^REPLICATED_JOB_NAME: not set, although JOBSET_NAME is"),
    ],
)
def test_half_set_variables_name_what_is_missing(environ, drop, message):
    with pytest.raises(ValueError, match=message):
        detect({name: value for name, value in environ.items() if name != drop})


@pytest.mark.parametrize(
    "environ, message",
    [
        (EXPLICIT | {"JAX_PROCESS_ID": "4"}, "^JAX_PROCESS_ID: process 4 is not below the number of processes 4$"),
        (EXPLICIT | {"JAX_NUM_PROCESSES": "0"}, "^JAX_NUM_PROCESSES: '0' is not a whole number of at least 1$"),
        (EXPLICIT | {"JAX_COORDINATOR_ADDRESS": "head:http"}, "^JAX_COORDINATOR_ADDRESS: 'head:http' is not host:port$"),
        (EXPLICIT | {"JAX_COORDINATOR_PORT": "99"}, "^JAX_COORDINATOR_PORT=99 contradicts the port of 10.0.0.1:1234"),
        (EXPLICIT | {"JAX_LOCAL_DEVICE_IDS": "all"}, "^JAX_LOCAL_DEVICE_IDS: 'all' is not a list such as 0,1$"),
        (TORCHRUN | {"RANK": "-1"}, "^RANK: '-1' is not a whole number"),
        (TORCHRUN | {"RANK": "16"}, "^RANK: process 16 is not below"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "^MASTER_PORT: 70000 is not a port"),
        (TORCHRUN | {"LOCAL_RANK": "8"}, "^LOCAL_RANK: 8 is not below LOCAL_WORLD_SIZE 8$"),
        (OPEN_MPI | {"JAX_NUM_PROCESSES": "8"}, "^JAX_NUM_PROCESSES=8 contradicts OMPI_COMM_WORLD_SIZE=4; unset one$"),
        (SLURM | {"JAX_NUM_PROCESSES": "8"}, "^JAX_NUM_PROCESSES=8 contradicts SLURM_NTASKS=16; unset one$"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1-"}, r"^SLURM_STEP_NODELIST: 'a\[1-' is not a node list$"),
        (JOBSET | {"JOB_INDEX": "1"}, "^JOB_INDEX: 1, so several Jobs make this run; set JAX_PROCESS_ID"),
    ],
)
def test_contradictions_name_the_variable(environ, message):
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    "nodelist, first",
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[1-3]", "node1"),
        ("node[007-009,12],other", "node007"),
        ("a[2,4]-b[01-03].cluster,c", "a2-b01.cluster"),
        ("gpu-a,gpu-b[1-2]", "gpu-a"),
    ],
)
def test_first_node(nodelist, first):
    assert first_node(nodelist) == first


def test_start_alone_does_nothing():
    assert distributed.start(environ={}) is None
    assert distributed.start(cpu_devices=3, environ={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}) is None
    single = distributed.start(environ={"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert single.processes == 1


def test_processes_must_divide_the_simulated_devices():
    with pytest.raises(ValueError, match="train.cpu_devices: 6 do not divide over 4 processes"):
        distributed.start(cpu_devices=6, environ=EXPLICIT)


JOIN = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxpar import distributed
from jaxpar.config import MeshShape
from jaxpar.mesh import explain, make_mesh
from jaxpar.parallel.collectives import all_reduce
launch = distributed.start(cpu_devices=8)
distributed.start(cpu_devices=8)
mesh = make_mesh(MeshShape(data=2, tensor=4))
x = jax.make_array_from_callback((8,), jax.NamedSharding(mesh, P(("data", "tensor"))), lambda index: jnp.arange(8.0)[index])
total = jax.jit(jax.shard_map(lambda x: all_reduce(x, ("data", "tensor")), mesh=mesh, in_specs=P(("data", "tensor")), out_specs=P()))(x)
print(launch.process, len(jax.local_devices()), jax.device_count(), float(total.addressable_data(0)[0]), explain(mesh), flush=True)
"""


def test_two_processes_of_four_devices_join_over_gloo():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    root = Path(__file__).parent.parent
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith(("SLURM_", "OMPI_", "JAX_"))}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(processes, results)):
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == f"{rank} 4 8 28.0 {{'data': 'inside a host', 'tensor': 'inside a host'}}"
