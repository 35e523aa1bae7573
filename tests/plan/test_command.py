"""`jaxpar compile` refuses what it could not write before it compiles anything, and compiles what was asked for. No compiler runs here."""

import types
from pathlib import Path

import pytest

from jaxpar import cli, configfile
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware, knobs, show, simulate

RUN = Path(__file__).parents[2] / "configs" / "runs" / "llama3_8b_h100x8.yaml"
H100 = RUN.parents[1] / "hardware" / "h100_sxm.yaml"


class Compiles(Exception):
    pass


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    def compile_run(*arguments, **settings):
        raise Compiles

    monkeypatch.setattr(compiling, "compile_run", compile_run)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hlo", "-"], "--hlo: - (standard output) is for --json only; give a file's name"),
        (["--trace", "-"], "--trace: - (standard output) is for --json only; give a file's name"),
        (["--png", "-"], "--png: - (standard output) is for --json only; give a file's name"),
        (["--json", "FOLDER"], "FOLDER: is a folder, not a file to write"),
        (["--trace", "FOLDER/none/trace.json"], "FOLDER/none/trace.json: there is no folder FOLDER/none to write it in"),
        (["--hlo", "FOLDER/file/step.hlo"], "FOLDER/file/step.hlo: there is no folder FOLDER/file to write it in"),
        (["--png", ""], "--png: '' is not a file's name"),
        (["--json", "FOLDER/a", "--trace", "./a"], "--trace: ./a: --json is written there; give another name"),
        (["--json", str(RUN)], f"--json: {RUN}: that is what was read; give another name"),
        (["--gpu", str(H100), "--hlo", str(H100)], f"--hlo: {H100}: that is what was read; give another name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_targets_that_cannot_be_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    there = [each.replace("FOLDER", str(tmp_path)) for each in arguments]
    assert cli.main(["compile", str(RUN), *there]) == 2
    assert capsys.readouterr().err == f"jaxpar: error: {message.replace('FOLDER', str(tmp_path))}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--json", "-"], ["--hlo", "step.hlo", "--png", "layer.png"], ["--json", "/dev/null", "--hlo", "/dev/null"]],
    ids=" ".join,
)
def test_targets_that_can_be_written(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Compiles):
        cli.main(["compile", str(RUN), *arguments])


@pytest.fixture
def compiles(monkeypatch):
    """What the command compiles: (nodes, GPUs a node) of the run itself, the names of the alternatives. `fits` may be changed."""
    done = types.SimpleNamespace(runs=[], alternatives=[], fits=True)

    def compile_run(config, gpus, nodes, gpus_per_node):
        done.runs.append(compiling.cluster(config, gpus, nodes, gpus_per_node))
        return types.SimpleNamespace(text="", mesh=None, hardware=gpus)

    def compare(changes, gpus, nodes, gpus_per_node):
        done.alternatives.extend(changes)
        return []

    monkeypatch.setattr(compiling, "compile_run", compile_run)
    monkeypatch.setattr(simulate, "simulate", lambda *a: types.SimpleNamespace(events=[]))
    monkeypatch.setattr(compiling, "report", lambda *a: {"fits": done.fits, "usable": 75 << 30, "memory": {"attention_workspace": 0}})
    monkeypatch.setattr(show, "text", lambda *a: "the report")
    monkeypatch.setattr(knobs, "compare", compare)
    return done


def test_alternatives_are_compiled_when_asked_for_and_when_it_does_not_fit(compiles, capsys):
    config = configfile.load(RUN, [])
    lighter, faster = set(knobs.lighter(config, 75 << 30)), set(knobs.faster(config))
    assert cli.main(["compile", str(RUN)]) == 0
    assert compiles.alternatives == []
    assert cli.main(["compile", str(RUN), "--knobs"]) == 0
    assert set(compiles.alternatives) == lighter | faster and faster - lighter and "train.remat=block" in lighter
    compiles.alternatives.clear()
    compiles.fits = False
    assert cli.main(["compile", str(RUN)]) == 0
    assert set(compiles.alternatives) == lighter
    assert capsys.readouterr().out == "the report\n" * 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
def test_a_full_disk_takes_one_file_and_not_the_others(compiles, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert cli.main(["compile", str(RUN), "--json", "/dev/full", "--trace", str(trace)]) == 2
    out, err = capsys.readouterr()
    assert out == "the report\n" and "traceEvents" in trace.read_text()
    assert err == "jaxpar: error: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    ("options", "cluster"),
    [([], (1, 8)), (["--gpus-per-node", "4"], (2, 4)), (["--gpus-per-node", "2"], (4, 2)), (["--nodes", "4"], (4, 2))],
    ids=lambda value: " ".join(map(str, value)),
)
def test_the_cluster_that_was_asked_for(options, cluster, compiles):
    assert cli.main(["compile", str(RUN), *options]) == 0
    assert compiles.runs == [cluster]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 3), "--gpus-per-node: hosts of 3 GPUs cannot make the 8 of the mesh; use one of 1, 2, 4, 8"),
        ((None, 16), "--gpus-per-node: hosts of 16 GPUs cannot make the 8 of the mesh; use one of 1, 2, 4, 8"),
        ((None, 0), "--gpus-per-node: 0 must be at least 1"),
        ((0, None), "--nodes: 0 must be at least 1"),
        ((1, None), "--nodes: 1 hosts of 8 GPUs, as h100_sxm has them, cannot make the 16 of .* use 2 or more, .* --gpus-per-node 16"),
    ],
)
def test_hosts_that_cannot_make_the_mesh(given, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        compiling.cluster(configfile.load(RUN, ["mesh.data=16"] if given == (1, None) else []), hardware.load("h100"), *given)


def test_a_larger_host_is_one_that_was_asked_for():
    config = configfile.load(RUN, ["mesh.data=16"])
    assert compiling.cluster(config, hardware.load("h100"), 1, 16) == (1, 16)
    assert compiling.cluster(config, hardware.load("h100"), 16, None) == (16, 1)


def test_errors_of_the_compiler_that_a_user_can_mend():
    """As XLA words them; what is its own failure stays one."""
    refusal = compiling._refusal
    assert refusal("INVALID_ARGUMENT: No such compile option: 'xla_oops'") == "gpu.flags: No such compile option: 'xla_oops'"
    full = "INTERNAL: ptxas exited with non-zero error code 65280, output: ptxas fatal   : Could not open output file '/no/tmpxft_1'\n\n"
    assert refusal(full).startswith("TMPDIR: XLA cannot write its temporary files") and "\n" not in refusal(full)
    assert refusal("INTERNAL: RET_CHECK failure") == ""
