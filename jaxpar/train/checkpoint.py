"""Checkpoints through Orbax: asynchronous, whole or not there, and free of any mesh.

    check_writable     refuse an output folder before anything is computed
    whole_or_absent    take away the empty folders of a run that was refused
    state_bytes        what a state takes on disk
    abstract           shapes, dtypes and shardings of a state, what `restore` wants
    SavedCheckpoints   read what is there, of a run that may still be going
    Checkpoints        save as well, keep the last N

A step is one folder, written under a temporary name and renamed when complete; a run killed in between leaves the temporary one, which
`latest` does not see and the next run removes. Inside: `params` and `training` (everything else of the state: optimizer, step, skipped)
as ordinary global arrays, each process writing its own shards, and `record`, JSON: version, step, data position, the resolved
configuration, and every leaf's shape and dtype.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpar import __version__, configfile
from jaxpar.config import Config
from jaxpar.train.failed_save import FailedSave, one_line

PyTree = Any
ITEMS = ("params", "training", "record")
SHOWN = 5


def check_writable(folder: str | Path, field: str = "checkpoint.folder", needed: int = 0) -> None:
    """Make `folder`, write a file in it and see that twice `needed` bytes are free: a new checkpoint is complete before an old one goes.

    Raises ValueError, one line naming `field` and the folder.
    """
    folder = Path(folder)
    probe = folder / f".probe.{jax.process_index()}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ValueError(f"{field}: cannot write in {folder} ({error.strerror or error}): choose another folder or free the disk") from None
    if free < 2 * needed:
        raise ValueError(
            f"{field}: {folder} has {_size(free)} free, a checkpoint takes {_size(needed)} and two must fit: "
            f"free space or choose another folder"
        )


@contextlib.contextmanager
def whole_or_absent(*folders: str | Path) -> Iterator[None]:
    """When what happens inside raises, remove those of `folders` (and folders above them) that were made meanwhile and are still empty."""
    absent = {place for folder in map(Path, folders) for place in (folder, *folder.parents) if not place.exists()}
    try:
        yield
    except BaseException:
        for place in sorted(absent, key=lambda place: len(place.parts), reverse=True):
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def state_bytes(state: PyTree) -> int:
    """Bytes of all leaves (arrays or ShapeDtypeStructs), replicas counted once."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))


def abstract(state: PyTree) -> PyTree:
    """`jax.ShapeDtypeStruct` with the sharding of each leaf of `state`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


class SavedCheckpoints:
    """The complete checkpoints in `folder`, to read. Changes nothing there, so the run that writes them may still be going.

    A context manager. Raises ValueError when there is no such folder.
    """

    def __init__(self, folder: str | Path) -> None:
        if not Path(folder).is_dir():
            raise ValueError(f"checkpoint.folder: {folder} does not exist: name a folder that `jaxpar train` wrote")
        self._open(folder, ocp.CheckpointManagerOptions(read_only=True))

    def _open(self, folder: str | Path, options: ocp.CheckpointManagerOptions) -> None:
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=ITEMS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Complete steps, rising."""
        return sorted(self._manager.all_steps())

    def restore(self, step: int, abstract_state: dict[str, PyTree]) -> dict[str, PyTree]:
        """The state of `step`, on the shardings of `abstract_state` (`jax.ShapeDtypeStruct` leaves), whatever mesh wrote it.

        Each device reads just its part. Raises ValueError listing the first leaves that differ when the file is of another model.
        """
        self._compare(step, _leaves(abstract_state), self.record(step)["leaves"])
        params, training = _halves(abstract_state)
        read = self._read(step, params=ocp.args.StandardRestore(params), training=ocp.args.StandardRestore(training))
        return {"params": read.params, **read.training}

    def restore_params(self, step: int, abstract_params: PyTree) -> PyTree:
        """The parameters alone of `step`, as `restore`; the optimizer's state is not read."""
        saved = {name: leaf for name, leaf in self.record(step)["leaves"].items() if name.startswith("params/")}
        self._compare(step, _leaves({"params": abstract_params}), saved)
        return self._read(step, params=ocp.args.StandardRestore(abstract_params)).params

    def config(self, step: int) -> dict[str, Any]:
        """The resolved configuration that `step` was saved with."""
        return self.record(step)["config"]

    def run(self, step: int | None = None) -> tuple[int, Config, dict[str, Any]]:
        """(step, the run that wrote it, its leaves {name: [shape, dtype]}), of the latest step unless `step` says which.

        Raises ValueError where there is no such step, and for a configuration that this version does not read.
        """
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise ValueError(f"checkpoint.folder: {self.folder} has no complete checkpoint: name the folder that holds the step folders")
        record = self.record(chosen)
        try:
            return chosen, configfile.from_dict(record["config"]), record["leaves"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"checkpoint.folder: step {chosen} in {self.folder} has a configuration of another version ({error}): choose another folder"
            ) from None

    def record(self, step: int) -> dict[str, Any]:
        """The JSON of `step`: version, step, data {step, seed}, config, leaves {name: [shape, dtype]}."""
        return self._read(step, record=ocp.args.JsonRestore()).record

    def close(self) -> None:
        """Release threads."""
        self._manager.close()

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (FileNotFoundError, KeyError) as error:
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(
                f"checkpoint.folder: {self.folder} has no complete step {step} (steps there: {there}): {one_line(error)}"
            ) from None
        except Exception as error:  # the storage library uses several types, and messages of thousands of characters
            if isinstance(error, (AssertionError, TypeError)):
                raise
            raise ValueError(
                f"checkpoint.folder: step {step} of {self.folder} cannot be read, its files are damaged: use another step "
                f"({one_line(error)})"
            ) from error

    def _compare(self, step: int, wanted: dict[str, Any], saved: dict[str, list[Any]]) -> None:
        differing = []
        for name in sorted(wanted.keys() | saved.keys(), key=lambda name: (not name.startswith("params/"), name)):
            mine = f"{tuple(wanted[name].shape)} {wanted[name].dtype}" if name in wanted else None
            theirs = f"{tuple(saved[name][0])} {saved[name][1]}" if name in saved else None
            if mine == theirs:
                continue
            if theirs is None:
                differing.append(f"{name} {mine} is missing in the file")
            elif mine is None:
                differing.append(f"{name} {theirs} in the file is unexpected")
            else:
                differing.append(f"{name} is {theirs} in the file, {mine} wanted")
        if differing:
            more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ValueError(
                f"checkpoint.folder: step {step} in {self.folder} is of another model or optimizer: "
                f"{'; '.join(differing[:SHOWN])}{more}: choose another folder, or the configuration saved in it"
            )


class Checkpoints(SavedCheckpoints):
    """The checkpoints of one run, in `folder`, the last `keep` of them. A context manager: leaving it waits for the save in flight.

    Every process of a run makes one and calls the same methods in the same order. What a killed run left unfinished is removed, so
    only one run may write in a folder. Raises ValueError when the folder cannot be written.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        check_writable(folder)
        self._open(folder, ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True))

    def save(self, step: int, state: dict[str, PyTree], config: dict[str, Any]) -> bool:
        """Start saving `state` {"params", "optimizer", …} as `step`; False when that step is already there.

        Returns once host memory holds the arrays, so that `state` may be donated; files are written behind the next steps. Waits for an
        earlier save first.
        Raises OSError naming the folder when this or the earlier save failed.
        """
        if step in self._manager.all_steps():
            return False
        record = {
            "version": __version__,
            "step": step,
            "data": {"step": step, "seed": config.get("data", {}).get("seed")},
            "config": config,
            "leaves": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in _leaves(state).items()},
        }
        params, training = _halves(state)
        with self._failures():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    training=ocp.args.StandardSave(training),
                    record=ocp.args.JsonSave(record),
                ),
                force=True,
            )
        return True

    def wait(self) -> None:
        """Return when no save is in flight. Raises OSError naming the folder when it failed."""
        with self._failures():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """`wait`, then release threads."""
        try:
            self.wait()
        finally:
            with self._failures():
                self._manager.close()

    def _failures(self) -> FailedSave:
        return FailedSave(self.folder)


def _halves(state: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    """Parameters apart from the rest, so that generation reads them without the optimizer."""
    return state["params"], {name: value for name, value in state.items() if name != "params"}


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
