"""Checkpoints come back bit for bit on any mesh, survive kill -9 in the middle of a save, and say what is wrong."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.train import checkpoint
from jaxpar.train.checkpoint import Checkpoints, SavedCheckpoints, abstract, check_writable, state_bytes

CONFIG = {"model": {"width": 16, "windows": [0, 4]}, "data": {"seed": 7}, "checkpoint": {"folder": None}}
ROOT = Path(__file__).parents[2]


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor"))


def state_on(mesh, seed=0, width=16):
    """Every dtype that a state holds, hostile bit patterns, an optax state with named tuples, sharded and replicated leaves."""
    rng = np.random.default_rng(seed)

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    odd = rng.standard_normal((8, width))
    odd[0, :4] = [np.nan, np.inf, -0.0, 5e-324]
    params = {
        "embedding": {"table": put(odd, "data", "tensor")},
        "layers": {"mlp": {"up": put(odd.astype(np.float32), None, ("tensor", "data") if width % 8 == 0 else None)}},
        "norm": {"weight": put(odd[1].astype(jnp.bfloat16))},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    return {
        "params": params,
        "optimizer": jax.tree.map(lambda leaf: leaf if len(leaf.sharding.device_set) == 8 else put(np.asarray(leaf)), optimizer),
        "step": put(np.int32(seed)),
        "skipped": put(np.int32(2**31 - 1)),
    }


def bits(tree):
    return [(np.asarray(leaf).dtype, np.asarray(leaf).shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 10, 20, 30 saved by keep=2, and the state of step 30."""
    folder = tmp_path_factory.mktemp("saved") / "made" / "here"
    mesh = mesh_of(4, 2)
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (10, 20, 30):
            state = state_on(mesh, step)
            assert checkpoints.save(step, state, CONFIG)
        assert not checkpoints.save(30, state, CONFIG), "a step that is there is not written again"
    return folder, state


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1)])
def test_round_trip_bit_for_bit_on_any_mesh(saved, shape):
    folder, state = saved
    wanted = abstract(state_on(mesh_of(*shape), seed=1))
    with SavedCheckpoints(folder) as checkpoints:
        back = checkpoints.restore(30, wanted)
        params = checkpoints.restore_params(30, wanted["params"])
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state) and bits(params) == bits(state["params"])
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True))
    assert bits(back) != bits(state_on(mesh_of(*shape), seed=29)), "the control"


def test_keeps_the_last_ones_with_their_record(saved):
    folder, state = saved
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest() == 30 and checkpoints.steps() == [20, 30]
        assert checkpoints.config(20) == CONFIG
        record = checkpoints.record(30)
        assert record["data"] == {"step": 30, "seed": 7} and record["version"]
        assert record["leaves"]["params/norm/weight"] == [[16], "bfloat16"]
        assert len(record["leaves"]) == len(jax.tree.leaves(state))
        with pytest.raises(ValueError, match=r"checkpoint\.folder: .* has no complete step 10 \(steps there: 20, 30\)"):
            checkpoints.config(10)


def test_another_model_is_refused_leaf_by_leaf(saved):
    folder, _ = saved
    wanted = abstract(state_on(mesh_of(4, 2)))
    wanted["params"]["norm"]["weight"] = jax.ShapeDtypeStruct((17,), jnp.bfloat16, sharding=wanted["step"].sharding)
    wanted["params"]["embedding"]["table"] = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=wanted["step"].sharding)
    wanted["params"]["head"] = wanted["params"]["layers"].pop("mlp")
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError) as caught:
            checkpoints.restore(30, wanted)
        message = str(caught.value)
        assert "\n" not in message and "step 30" in message and "another model" in message
        assert "params/norm/weight is (16,) bfloat16 in the file, (17,) bfloat16 wanted" in message
        assert "params/embedding/table is (8, 16) float64 in the file, (8, 16) float32 wanted" in message
        assert "params/head/up (8, 16) float32 is missing in the file" in message
        assert "params/layers/mlp/up (8, 16) float32 in the file is unexpected" in message
        with pytest.raises(ValueError, match=r"optimizer.* and [0-9]+ more"):
            checkpoints.restore(30, abstract(state_on(mesh_of(4, 2), width=4)))


def test_donating_the_state_after_save_does_not_reach_the_file(tmp_path):
    """The copy to host must be complete when `save` returns: the next step overwrites the buffers."""
    mesh = mesh_of(4, 2)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    value = jax.device_put(np.arange(2**21, dtype=np.float32), sharding)
    state = {"params": {"w": value}, "step": jnp.int32(1)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, CONFIG)
        for _ in range(3):
            value = overwrite(value)
        value.block_until_ready()
        checkpoints.wait()
        back = checkpoints.restore_params(1, {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)})
    assert np.array_equal(back["w"], np.arange(2**21, dtype=np.float32))
    assert np.asarray(value)[5] == -1


# A run in a process of its own: saves step 1, then starts step 2 whose last write before the commit is slow, and reports.
RUN = """
    import os, sys, time
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, jax.numpy as jnp
    from orbax.checkpoint._src.path import atomicity
    from jaxpar.train.checkpoint import Checkpoints, abstract
    state = lambda n: {"params": {"w": jnp.full((64, 64), n, jnp.float32)}, "step": jnp.int32(n)}
    folder = sys.argv[1]
"""
KILLED = """
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    finalize = atomicity.AtomicRenameTemporaryPath.finalize
    async def slow(self, *arguments, **named):
        print("committing", flush=True)
        time.sleep(60)
    atomicity.AtomicRenameTemporaryPath.finalize = slow
    checkpoints.save(2, state(2), {})
    print("training goes on", flush=True)
    checkpoints.wait()
"""
FULL = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    big = {"params": {"w": jax.random.normal(jax.random.key(0), (512, 512))}, "step": jnp.int32(2)}
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, state(1), {})
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            checkpoints.save(2, big, {})
            checkpoints.wait()
    except OSError as error:
        print("told:", error, flush=True)
"""


def run(script, folder, *arguments, **environment):
    code = textwrap.dedent(RUN) + textwrap.dedent(script)
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", code, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_kill_in_the_middle_of_a_save_loses_nothing_complete(tmp_path):
    process = run(KILLED, tmp_path)
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if "committing" in seen and "training goes on" in seen:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, "\n".join([*seen, rest])
    left = [name for name in os.listdir(tmp_path) if name != "1"]
    assert any("tmp" in name and name.startswith("2") for name in left), f"the control: an unfinished step 2 is there, {left}"

    with SavedCheckpoints(tmp_path) as reader:
        assert reader.latest() == 1 and reader.config(1) == {}
        time.sleep(0.3)  # removal would happen on a thread of its own
    assert len(os.listdir(tmp_path)) == 1 + len(left), "a reader removes nothing: the writer may be alive"
    single = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    wanted = {
        "params": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=single)},
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=single),
    }
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
        back = checkpoints.restore(1, wanted)
        assert int(back["step"]) == 1 and np.all(np.asarray(back["params"]["w"]) == 1)
        checkpoints.save(3, jax.tree.map(lambda x: x + 2, back), {})
    assert sorted(os.listdir(tmp_path)) == ["1", "3"], "the next run removed what was unfinished"
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(3, wanted)["step"]) == 3


def test_a_disk_that_fills_during_a_save_is_told_in_one_line(tmp_path):
    process = run(FULL, tmp_path)
    out = process.communicate(timeout=120)[0]
    told = out.splitlines()
    assert len(told) == 1 and told[0].startswith(f"told: checkpoint.folder: saving in {tmp_path} failed, complete steps are untouched"), out
    assert process.returncode == 0
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1 and checkpoints.config(1) == {}


@pytest.mark.parametrize(("path", "told"), [("3.orbax-checkpoint-tmp/params/d/1", 0), ("corpus/shard", 1)])
def test_a_write_that_fails_after_the_first_is_not_told_again(path, told, caplog):
    """Its future has no frames and, the save being over, nobody to take its exception. Anybody else's is still told."""
    loop = asyncio.new_event_loop()
    late = loop.create_future()
    late.set_exception(ValueError(f"OUT_OF_RANGE: Error writing {path}: File too large"))
    del late
    gc.collect()
    loop.close()
    assert len(caplog.records) == told


def test_unwritable_or_full_folder_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint\.folder: cannot write in .*file/below .*choose another folder"):
        Checkpoints(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"checkpoint\.folder: .*nowhere does not exist"):
        SavedCheckpoints(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"log\.folder: cannot write in /proc/nowhere"):
        check_writable("/proc/nowhere", "log.folder")
    needed = state_bytes(abstract(state_on(mesh_of(4, 2))))
    assert needed == 3 * (8 * 16 * 8 + 8 * 16 * 4 + 16 * 2) + 3 * 4
    check_writable(tmp_path, needed=needed)
    assert os.listdir(tmp_path) == ["file"], "the probe is gone"
    usage = type("Usage", (), {"free": 2 * needed - 1})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"checkpoint\.folder: .* has 0\.01 MiB free, a checkpoint takes 0\.00 MiB and two must fit"):
        check_writable(tmp_path, needed=needed)


def test_other_files_in_the_folder_are_left_alone(saved):
    folder, _ = saved
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir(exist_ok=True)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [20, 30]
    assert (folder / "tokenizer.json").exists() and (folder / "notes").is_dir()


PROCESS = """
    import sys
    from jaxpar.train import corpus
    from jaxpar.train.data import Loader, Rows, local_sequences, place
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1, 2), ("data", "expert", "seq"))
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    loader = Loader(Rows(corpus.collect([np.arange(1, 90) % 40] * 3, 40), 8, 40), batch=16, accumulation=2, seed=0, shuffle=True)
    sharding = on(None, ("data", "expert"), "seq")
    mine = local_sequences(sharding, 8)
    assert mine.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][jax.process_index()]
    placed, whole = place(loader.batch_at(3, mine), sharding, 8), loader.batch_at(3)
    for name, value in placed.items():
        for shard in value.addressable_shards:
            assert np.array_equal(shard.data, whole[name][shard.index])
    numbers = np.arange(64.0).reshape(8, 8)
    put = lambda sharding: jax.make_array_from_callback((8, 8), sharding, lambda index: numbers[index])
    state = lambda sharding: {"params": {"w": put(sharding)}, "optimizer": {"m": put(on())}}
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(on("data", "seq")), {"run": 1})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3] and checkpoints.config(3) == {"run": 1}
        back = checkpoints.restore(3, abstract(state(on(None, ("seq", "data")))))
    for shard in back["params"]["w"].addressable_shards:
        assert shard.data.shape == (8, 1) and np.array_equal(shard.data, numbers[shard.index])
    print("done")
"""


@pytest.mark.slow
def test_two_processes_read_their_sequences_and_share_a_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [run(PROCESS, tmp_path, address, str(n), **flags) for n in range(2)]
    for process in processes:
        out = process.communicate(timeout=120)[0]
        assert process.returncode == 0 and "done" in out, out
