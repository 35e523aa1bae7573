"""Joining the processes of a run: which launcher started this one, how many there are, where the first one listens.

    Launch   what a process needs to know to join
    detect   environment variables -> Launch, or None where there is a single process; pure
    start    join, and cut a CPU into the devices that a run simulates

A launcher inside another wins, so the order is:

    1 explicit     JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES, JAX_PROCESS_ID; Kubeflow sets them, or the user
    2 torchrun     MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK; LOCAL_RANK, LOCAL_WORLD_SIZE
    3 Open MPI     OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_RANK, _LOCAL_SIZE; the coordinator from MASTER_ADDR, or Slurm's node list
    4 Slurm        SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, a node list, SLURM_JOB_ID
    5 Kubernetes   JOB_COMPLETION_INDEX, JAX_NUM_PROCESSES; the coordinator from JOBSET_NAME and REPLICATED_JOB_NAME

Under 3 to 5 JAX_COORDINATOR_ADDRESS, without JAX_PROCESS_ID, only replaces the coordinator.

Local devices: all that the process sees when it is alone on its host; with several on a host the one of its local rank, unless
CUDA_VISIBLE_DEVICES (or its kin) already leaves just one. JAX_LOCAL_DEVICE_IDS ("0,1") overrides that under every launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

# Above the ports that Linux gives to outgoing connections (32768 to 60999), so a listener there is rarely taken.
PORTS = range(61_000, 65_000)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Launch:
    """`coordinator` is host:port of process 0; `local_device_ids` None means every device that this process sees."""

    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...] | None
    source: str


class _Environment:
    """Environment variables, empty ones counted as absent; errors name the variable and the launcher that made it necessary."""

    def __init__(self, environ: Mapping[str, str]):
        self.values = {name: value for name, value in environ.items() if value.strip()}

    def has(self, *names: str) -> bool:
        return any(name in self.values for name in names)

    def text(self, name: str, because: str) -> str:
        if name not in self.values:
            raise ValueError(f"{name}: not set, although {because}; set it, or unset the others")
        return self.values[name]

    def number(self, name: str, because: str, least: int = 0) -> int:
        value = self.text(name, because)
        if not re.fullmatch(r"\d+", value) or int(value) < least:
            raise ValueError(f"{name}: {value!r} is not a whole number of at least {least}")
        return int(value)

    def agree(self, name: str, other: str) -> None:
        """Refuse two variables that give one number differently."""
        if self.has(name) and self.number(name, "") != self.number(other, f"{name} is"):
            raise ValueError(f"{name}={self.values[name]} contradicts {other}={self.values[other]}; unset one")


def detect(environ: Mapping[str, str]) -> Launch | None:
    """The launch that `environ` describes, by the order at the top of this file; None where no launcher is at work.

    Raises ValueError naming the variable that is missing, malformed or contradicts another.
    """
    env = _Environment(environ)
    for present, read in (
        (env.has("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES") and not _completes_another(env), _explicit),
        (env.has("RANK", "WORLD_SIZE"), _torchrun),
        (env.has("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _open_mpi),
        (env.has("SLURM_PROCID"), _slurm),
        (env.has("JOB_COMPLETION_INDEX"), _kubernetes),
    ):
        if present:
            launch = read(env)
            if launch.process >= launch.processes:
                raise ValueError(f"{launch.source}: process {launch.process} is not below the number of processes {launch.processes}")
            return launch
    return None


def _completes_another(env: _Environment) -> bool:
    """Without JAX_PROCESS_ID the other JAX variables only complete what Open MPI, Slurm or Kubernetes leave out."""
    inner = env.has("JAX_PROCESS_ID", "RANK", "WORLD_SIZE")
    return not inner and env.has("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


def _explicit(env: _Environment) -> Launch:
    because = "another JAX_ variable of a launch is"
    return Launch(
        coordinator=_with_port(env.text("JAX_COORDINATOR_ADDRESS", because), env),
        processes=env.number("JAX_NUM_PROCESSES", because, least=1),
        process=env.number("JAX_PROCESS_ID", because),
        local_device_ids=_given_devices(env),
        source="JAX_PROCESS_ID",
    )


def _torchrun(env: _Environment) -> Launch:
    because = "RANK or WORLD_SIZE is"
    processes, process = env.number("WORLD_SIZE", because, least=1), env.number("RANK", because)
    # torchrun itself listens on MASTER_PORT when its workers share the agent's store.
    taken = env.values.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        coordinator=f"{_host(env.text('MASTER_ADDR', because))}:{_port(env, 'MASTER_PORT', because) + taken}",
        processes=processes,
        process=process,
        local_device_ids=_local_devices(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        source="RANK",
    )


def _open_mpi(env: _Environment) -> Launch:
    because = "Open MPI started this process"
    processes, process = env.number("OMPI_COMM_WORLD_SIZE", because, least=1), env.number("OMPI_COMM_WORLD_RANK", because)
    env.agree("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE")
    if processes == 1:
        coordinator = "localhost:0"
    elif env.has("JAX_COORDINATOR_ADDRESS"):
        coordinator = _with_port(env.text("JAX_COORDINATOR_ADDRESS", because), env)
    elif env.has("MASTER_ADDR"):
        coordinator = f"{_host(env.text('MASTER_ADDR', because))}:{_port(env, 'MASTER_PORT', 'MASTER_ADDR is')}"
    elif env.has("SLURM_JOB_ID"):
        coordinator = _slurm_coordinator(env)
    elif env.values.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(processes):
        coordinator = f"localhost:{PORTS[0]}"
    else:
        raise ValueError(
            "JAX_COORDINATOR_ADDRESS: not set, and Open MPI does not say where process 0 runs; pass -x JAX_COORDINATOR_ADDRESS=host:port"
        )
    devices = _local_devices(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Launch(coordinator, processes, process, devices, "OMPI_COMM_WORLD_RANK")


def _slurm(env: _Environment) -> Launch:
    because = "SLURM_PROCID is"
    count = "SLURM_STEP_NUM_TASKS" if env.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    processes, process = env.number(count, because, least=1), env.number("SLURM_PROCID", because)
    env.agree("JAX_NUM_PROCESSES", count)
    if processes == 1:
        return Launch("localhost:0", 1, process, _given_devices(env), "SLURM_PROCID")
    local = env.number("SLURM_LOCALID", because)
    tasks = env.values.get("SLURM_STEP_TASKS_PER_NODE") or env.values.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", tasks)]
    devices = _given_devices(env)
    if devices is None and (local > 0 or max(counts, default=1) > 1) and not _narrowed(env):
        devices = (local,)
    return Launch(_slurm_coordinator(env), processes, process, devices, "SLURM_PROCID")


def _slurm_coordinator(env: _Environment) -> str:
    """First node of the step, on a port that two steps of one job or two jobs of one node rarely share."""
    because = "Slurm started this process"
    if env.has("JAX_COORDINATOR_ADDRESS"):
        return _with_port(env.text("JAX_COORDINATOR_ADDRESS", because), env)
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if env.has(name)), names[0])
    step = env.values.get("SLURM_STEP_ID", "0")
    job = env.number("SLURM_JOB_ID", because) + (int(step) if step.isdigit() else 0)
    return f"{first_node(env.text(name, because))}:{PORTS[job % len(PORTS)]}"


def _kubernetes(env: _Environment) -> Launch:
    because = "JOB_COMPLETION_INDEX is"
    if not env.has("JAX_NUM_PROCESSES"):
        raise ValueError(
            "JAX_NUM_PROCESSES: not set, although JOB_COMPLETION_INDEX is; set it to the completions of the Job, "
            "or to 1 if its pods are independent"
        )
    processes, process = env.number("JAX_NUM_PROCESSES", because, least=1), env.number("JOB_COMPLETION_INDEX", because)
    if processes == 1:
        return Launch("localhost:0", processes, 0, _given_devices(env), "JOB_COMPLETION_INDEX")
    if env.values.get("JOB_INDEX", "0") != "0":
        raise ValueError(
            f"JOB_INDEX: {env.values['JOB_INDEX']}, so several Jobs make this run; set JAX_PROCESS_ID, unique over all of them"
        )
    if env.has("JAX_COORDINATOR_ADDRESS"):
        coordinator = _with_port(env.text("JAX_COORDINATOR_ADDRESS", because), env)
    elif env.has("JOBSET_NAME"):
        jobset, job = env.text("JOBSET_NAME", because), env.text("REPLICATED_JOB_NAME", "JOBSET_NAME is")
        coordinator = _with_port(f"{jobset}-{job}-0-0.{jobset}", env)
    else:
        raise ValueError("JAX_COORDINATOR_ADDRESS: not set, although JOB_COMPLETION_INDEX is; set host:port of pod 0, or JOBSET_NAME")
    return Launch(coordinator, processes, process, _given_devices(env), "JOB_COMPLETION_INDEX")


def first_node(nodelist: str) -> str:
    """The first host of Slurm's notation: "a[007-009,12]-x[1,2],b" is "a007-x1"."""
    first = re.match(r"(?:[^,\[\]]|\[[\d,-]+\])+", nodelist)
    if not first or "[" in re.sub(r"\[[\d,-]+\]", "", nodelist):
        raise ValueError(f"SLURM_STEP_NODELIST: {nodelist!r} is not a node list")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _port(env: _Environment, name: str, because: str) -> int:
    port = env.number(name, because, least=1)
    if port > 65_535:
        raise ValueError(f"{name}: {port} is not a port; ports end at 65535")
    return port


def _host(address: str) -> str:
    """As it stands before a colon and a port: an IPv6 address needs brackets."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _with_port(address: str, env: _Environment) -> str:
    """host or host:port, the port from JAX_COORDINATOR_PORT where the address has none."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        if env.has("JAX_COORDINATOR_PORT") and env.values["JAX_COORDINATOR_PORT"] != port:
            raise ValueError(f"JAX_COORDINATOR_PORT={env.values['JAX_COORDINATOR_PORT']} contradicts the port of {address}; unset one")
        if not host or not 1 <= int(port) <= 65_535:
            raise ValueError(f"JAX_COORDINATOR_ADDRESS: {address!r} is not host:port")
        return address
    if colon and "[" not in address:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS: {address!r} is not host:port")
    return f"{address}:{_port(env, 'JAX_COORDINATOR_PORT', '') if env.has('JAX_COORDINATOR_PORT') else PORTS[0]}"


def _given_devices(env: _Environment) -> tuple[int, ...] | None:
    if not env.has("JAX_LOCAL_DEVICE_IDS"):
        return None
    text = env.values["JAX_LOCAL_DEVICE_IDS"]
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ValueError(f"JAX_LOCAL_DEVICE_IDS: {text!r} is not a list such as 0,1")
    return tuple(int(number) for number in text.split(","))


def _narrowed(env: _Environment) -> bool:
    """Whether the launcher already leaves this process a single device: its local rank would then point past the end."""
    return any(env.has(name) and "," not in env.values[name] for name in VISIBLE)


def _local_devices(env: _Environment, rank: str, size: str) -> tuple[int, ...] | None:
    """This process's devices where it shares a host with others; a lone process takes all."""
    given = _given_devices(env)
    if given is not None or not env.has(rank) or env.values.get(size) == "1" or _narrowed(env):
        return given
    local = env.number(rank, "")
    if env.has(size) and local >= env.number(size, "", least=1):
        raise ValueError(f"{rank}: {local} is not below {size} {env.values[size]}")
    return (local,)


def start(cpu_devices: int | None = None, environ: Mapping[str, str] | None = None) -> Launch | None:
    """Join the other processes of this run, if there are any; call it before anything asks JAX for its devices. A second call does nothing.

    `cpu_devices` (`train.cpu_devices`): where JAX runs on CPU, the devices to simulate over all processes, unless XLA_FLAGS says how many.
    Several CPU processes talk through Gloo.
    Raises ValueError as `detect` does, and where the processes do not divide `cpu_devices`.
    """
    environ = os.environ if environ is None else environ
    launch = detect(environ)
    processes = launch.processes if launch else 1
    if cpu_devices is not None and "xla_force_host_platform_device_count" not in environ.get("XLA_FLAGS", ""):
        if cpu_devices % processes:
            raise ValueError(f"train.cpu_devices: {cpu_devices} do not divide over {processes} processes")
        _simulate(cpu_devices // processes)
    if launch is None or processes == 1 or jax.distributed.is_initialized():
        return launch
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=launch.coordinator,
        num_processes=launch.processes,
        process_id=launch.process,
        local_device_ids=launch.local_device_ids,
        cluster_detection_method="deactivate",
    )
    return launch


def _simulate(count: int) -> None:
    """Cut the CPU into `count` devices. Harmless where there is an accelerator, and too late once JAX has looked for its devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
