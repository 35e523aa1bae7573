"""Strict specs, ZeRO placement, and the checks that need two sections of a configuration."""

import dataclasses
import warnings

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.config import (
    CheckpointConfig,
    Config,
    ContextConfig,
    DataConfig,
    ExpertsConfig,
    MeshShape,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    TrainConfig,
)
from jaxpar.mesh import EXPERT, REPLICA, TENSOR
from jaxpar.params import Parameter
from jaxpar.rules import DENSE, Rules, spec_axes, unsharded, varying_axes, zero_placement, zero_spec
from jaxpar.run_checks import check_run


def sizes(**axes):
    return {"pipe": 1, "data": 1, "expert": 1, "seq": 1, "tensor": 1} | axes


def query(heads=8, layers=3):
    return Parameter((layers, heads, 6, 16), ("layers", "heads", "head_dim", "embed"), matrix=2, stacked=True)


def key(heads):
    return Parameter((heads, 6, 16), ("kv_heads", "head_dim", "embed"), matrix=2)


NORM = Parameter((16,), ("embed",), "ones", role="norm")


def test_spec():
    rules = Rules(sizes(data=2, tensor=4), DENSE)
    assert rules.spec("query", query()) == P(None, "tensor", None, None)
    assert rules.spec("norm", NORM) == P(None)


@pytest.mark.parametrize(
    "kv_heads, tensor, spec", [(4, 2, P("tensor", None, None)), (1, 4, P(None, None, None)), (2, 4, P(None, None, None))]
)
def test_kv_heads_are_split_or_whole(kv_heads, tensor, spec):
    assert Rules(sizes(tensor=tensor), DENSE).spec("key", key(kv_heads)) == spec


@pytest.mark.parametrize("kv_heads, tensor, works", [(3, 4, "1, 3, 6"), (6, 4, "1, 2, 3, 6"), (2, 3, "1, 2, 4")])
def test_kv_heads_that_fit_neither_way_name_sizes_that_work(kv_heads, tensor, works):
    with pytest.raises(ValueError, match=rf"key .*tensor {tensor}.*kv_heads -> tensor.*sizes that work: {works}$"):
        Rules(sizes(tensor=tensor), DENSE).spec("key", key(kv_heads))


@pytest.mark.parametrize(
    "parameter, table, message",
    [
        (Parameter((4, 4), ("hedas", "embed")), {}, "no rule for logical axis 'hedas'"),
        (Parameter((4, 4), ("heads", "mlp")), {}, "uses mesh axis 'tensor' a second time"),
        (Parameter((4, 4), ("heads", "embed")), {"embed": "model"}, "rule embed -> model names a mesh axis that does not exist"),
        (Parameter((6, 4), ("heads", "embed")), {}, "rule heads -> tensor cannot cut 6 in 4; sizes that work: 1, 2, 3, 6"),
        (Parameter((4, 6), ("heads", "embed")), {"embed": ("data", "seq")}, "rule embed -> .* cannot cut 6 in 4"),
    ],
)
def test_strict(parameter, table, message):
    with pytest.raises(ValueError, match=message) as error:
        Rules(sizes(data=2, seq=2, tensor=4), DENSE | table).spec("some/name", parameter)
    text = str(error.value)
    assert "some/name" in text and str(parameter.shape) in text and "data 2 × seq 2 × tensor 4" in text and "\n" not in text


def test_varying_axes():
    assert varying_axes(NORM, P(None), sequence_parallel=False) == REPLICA
    assert varying_axes(NORM, P(None), sequence_parallel=True) == (*REPLICA, "tensor")
    assert varying_axes(query(), P(None, "tensor", None, None), sequence_parallel=True) == REPLICA
    # Whole key heads, and q/k norms, meet heads that are split: their gradient is partial without sequence parallelism too.
    assert varying_axes(key(1), P(None, None, None), sequence_parallel=False) == (*REPLICA, "tensor")
    assert varying_axes(Parameter((6,), ("head_dim",), role="norm"), P(None), sequence_parallel=False) == (*REPLICA, "tensor")
    assert varying_axes(query(), P(None, "tensor", None, "expert"), sequence_parallel=False) == ("data", "seq")


@pytest.mark.parametrize(
    "parameter, spec, mesh, placement, result",
    [
        # The outermost dim, so that gathered blocks lie one after another; not the layers although they would divide.
        (query(layers=4), P(None, "tensor", None, None), sizes(data=4, tensor=2), (1, REPLICA), P(None, ("tensor", *REPLICA), None, None)),
        # It does not divide: the largest dim not split yet.
        (query(6, layers=4), P(None, "tensor", None, None), sizes(data=4, tensor=2), (3, REPLICA), P(None, "tensor", None, REPLICA)),
        # Columns of a table to look up.
        (
            Parameter((16, 8), ("vocabulary", "embed"), role="embedding"),
            P("tensor", None),
            sizes(data=4, tensor=2),
            (1, REPLICA),
            P("tensor", REPLICA),
        ),
        # Nothing else divides by 4: the split dim, its own axis first.
        (
            Parameter((16, 6), ("heads", "head_dim")),
            P("tensor", None),
            sizes(data=2, seq=2, tensor=2),
            (0, REPLICA),
            P(("tensor", *REPLICA), None),
        ),
        (NORM, P(None), sizes(data=3), None, P(None)),
        (NORM, P(None), sizes(tensor=4), None, P(None)),
        # An expert's weight is not replicated over `expert`.
        (
            Parameter((4, 8), ("heads", "embed")),
            P("expert", None),
            sizes(data=2, expert=4),
            (1, ("data", "seq")),
            P("expert", ("data", "seq")),
        ),
    ],
)
def test_zero_placement(parameter, spec, mesh, placement, result):
    assert zero_placement(parameter, spec, mesh) == placement
    assert zero_spec(spec, placement) == result


def test_a_matrix_that_zero_cannot_split_is_an_error():
    with pytest.raises(
        ValueError, match=r"train.zero: matrix of shape \(3, 8, 6, 16\).* no dim that 5 devices.*numbers that work: 1, 2, 3, 4, 6"
    ):
        zero_placement(query(), P(None, "tensor", None, None), sizes(data=5, tensor=2))


def test_unsharded_names_vectors_only_where_zero_would_split():
    parameters, specs = {"norm": NORM, "query": query(heads=6)}, {"norm": P(None), "query": P(None, "tensor", None, None)}
    assert unsharded(parameters, specs, sizes(data=3)) == ("norm",)
    assert unsharded(parameters, specs, sizes(data=2)) == ()
    assert unsharded(parameters, specs, sizes(tensor=2)) == ()


@settings(deadline=None, max_examples=50)
@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    data=st.integers(1, 6),
    tensor=st.sampled_from([1, 2, 3]),
    stacked=st.booleans(),
)
def test_a_placement_divides_its_dim_exactly(shape, data, tensor, stacked):
    names = ("layers", "heads", "head_dim", "embed")[: len(shape)] if stacked else ("heads", "head_dim", "embed", "x")[: len(shape)]
    shape = [size * tensor if name == "heads" else size for size, name in zip(shape, names)]
    parameter = Parameter(tuple(shape), names, role="norm", stacked=stacked)
    mesh = sizes(data=data, tensor=tensor)
    spec = Rules(mesh, DENSE | {"x": None}).spec("p", parameter)
    placement = zero_placement(parameter, spec, mesh)
    local = [size // (tensor if entry else 1) for size, entry in zip(shape, spec)]
    free = [dim for dim, size in enumerate(local) if size % data == 0 and not (stacked and dim == 0)]
    assert (placement is None) == (data == 1 or not free)
    if placement:
        assert placement[0] in free
        assert set(spec_axes(zero_spec(spec, placement))) == set(spec_axes(spec)) | set(REPLICA)


MODEL = ModelConfig(vocabulary=2048, width=128, layers=4, heads=8, kv_heads=4, mlp_width=344)
GOOD = Config(
    model=MODEL,
    mesh=MeshShape(data=4, tensor=2),
    data=DataConfig(sequence=128),
    train=TrainConfig(batch=32, accumulation=2, interleave=2),
    checkpoint=CheckpointConfig(),
)


def changed(**sections):
    return dataclasses.replace(GOOD, **{name: dataclasses.replace(getattr(GOOD, name), **values) for name, values in sections.items()})


def test_a_good_run_passes_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_run(GOOD, 8)
        check_run(changed(train={"zero": 3}), 8)


@pytest.mark.parametrize(
    "sections, devices, message",
    [
        ({}, 4, r"mesh: data 4 × tensor 2 makes 8 devices, but there are 4; set mesh.data=2"),
        ({"mesh": {"data": 1, "tensor": 1}}, 8, r"mesh: one device makes 1 devices, but there are 8; set mesh.data=8"),
        ({"mesh": {"data": 1, "tensor": 3}}, 8, r"mesh: tensor 3 makes 3 devices, but there are 8; set sizes that multiply to 8"),
        ({"mesh": {"data": 1, "tensor": 16}}, 16, r"mesh.tensor: 16 does not divide model.heads 8; tensor sizes that work: 1, 2, 4, 8"),
        (
            {"mesh": {"data": 2, "tensor": 4}, "model": {"heads": 12, "kv_heads": 6, "head_width": 16}},
            8,
            r"mesh.tensor: 4 does not divide model.kv_heads 6",
        ),
        ({"mesh": {"data": 1, "tensor": 8}, "model": {"mlp_width": 340}}, 8, r"mesh.tensor: 8 .* model.mlp_width 340; .*work: 1, 2, 4$"),
        ({"train": {"batch": 24}}, 8, r"train.batch: 24 .* 4 × train.accumulation 2 × train.interleave 2 = 16; batches that work: 16, 32"),
        ({"data": {"sequence": 127}}, 8, r"data.sequence: 127 .* × mesh.tensor 2; .*work: 126, 128, or train.sequence_parallel=false"),
        ({"train": {"master_dtype": "bfloat16"}}, 8, r"train.master_dtype: bfloat16 .*use float32"),
        ({"data": {"vocabulary": 4096}}, 8, r"data.vocabulary: .* 4096 .* model.vocabulary 2048; set data.vocabulary=2048 or less"),
        ({"mesh": {"data": 1, "pipe": 5, "tensor": 1}}, 5, r"mesh.pipe: 5 is not supported"),
        ({"train": {"batch": 1 << 28}}, 8, r"train.batch: .* tokens of a device in a microbatch .* 2\^31"),
        ({"mesh": {"data": 2, "pipe": 2}}, 8, r"mesh.pipe: 2 is not supported"),
        (
            {"mesh": {"data": 1, "seq": 4}, "data": {"sequence": 124}},
            8,
            r"data.sequence: 124 .* mesh.seq × mesh.tensor 8 in 8 chunks \(train.context.layout zigzag\); lengths that work: 120, 128$",
        ),
        (
            {"mesh": {"data": 1, "seq": 4}, "data": {"sequence": 132}, "train": {"context": ContextConfig(layout="striped")}},
            8,
            r"data.sequence: 132 .* 8; lengths that work: 128, 136, or train.sequence_parallel=false",
        ),
        (
            {"mesh": {"data": 1, "seq": 4}, "train": {"context": ContextConfig(method="ulysses")}, "model": {"heads": 4, "kv_heads": 4}},
            8,
            r"mesh.seq: 4 devices cannot trade .* 2 query heads and 2 key/value heads .*; degrees that work: 1, 2$",
        ),
        (
            {"mesh": {"data": 1, "seq": 4}, "train": {"context": ContextConfig(method="usp", ulysses=3)}},
            8,
            r"train.context.ulysses: 3 does not divide mesh.seq 4; sizes that work: 1, 2, 4",
        ),
        ({"model": {"prefix": 128}}, 8, r"model.prefix: 128 tokens leave none to predict of rows of data.sequence 128; use 127 or less"),
        ({"model": {"moe": MoeConfig(experts=8)}, "optimizer": {"name": "muon"}}, 8, r"optimizer.name: muon .*; use adamw or lion"),
    ],
)
def test_check_run_refuses(sections, devices, message):
    with pytest.raises(ValueError, match=message) as error:
        check_run(changed(**sections), devices)
    assert "\n" not in str(error.value)


EXPERTS = {"model": {"moe": MoeConfig(experts=12, per_token=2)}}


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"mesh": {"data": 1, "expert": 8, "tensor": 1}}, r"model.moe.experts: 12 .* mesh.expert 8; .*work: 1, 2, 3, 4, 6, 12$"),
        (
            {"mesh": {"data": 1, "expert": 4, "tensor": 2}, "train": {"experts": ExpertsConfig(axes=(EXPERT, TENSOR))}},
            r"model.moe.experts: 12 .* mesh.expert × mesh.tensor 8; .*work: 1, 2, 3, 4, 6, 12$",
        ),
        (
            {"mesh": {"data": 2, "expert": 2}, "train": {"experts": ExpertsConfig(axes=(EXPERT, TENSOR)), "sequence_parallel": False}},
            r"train.experts.axes: folding .*; set train.sequence_parallel=true, or leave tensor out",
        ),
        (
            {
                "model": {"moe": MoeConfig(experts=12, width=6)},
                "mesh": {"data": 2, "tensor": 4},
                "train": {"experts": ExpertsConfig(columns=True)},
            },
            r"train.experts.columns: mesh.tensor 4 does not divide model.moe.width 6; sizes that work: 1, 2, 3, 6$",
        ),
        (
            {"model": {"moe": MoeConfig(experts=12, shared_width=6)}, "mesh": {"data": 2, "tensor": 4}},
            r"mesh.tensor: 4 does not divide model.moe.shared_width 6; tensor sizes that work: 1, 2$",
        ),
        (
            {"train": {"experts": ExpertsConfig(chunks=3)}},
            r"train.experts.chunks: \d+ tokens .* do not divide in 3 chunks; numbers that work: 1, 2, 4$",
        ),
        (
            {"train": {"experts": ExpertsConfig(dispatch="capacity", capacity_factor=0.25)}},
            r"train.experts.capacity_factor: 0.25 is below 1/k = 0.5: at least 75% of .* about 2,048 of a step's 4,096 tokens or more",
        ),
    ],
)
def test_check_run_refuses_experts(sections, message):
    with pytest.raises(ValueError, match=message) as error:
        check_run(changed(**{**EXPERTS, **sections}), 8)
    assert "\n" not in str(error.value)


def test_check_run_takes_experts_that_divide():
    check_run(changed(**EXPERTS, mesh={"data": 2, "expert": 2}, train={"experts": ExpertsConfig(axes=(EXPERT, TENSOR))}), 8)
    check_run(changed(mesh={"data": 2, "expert": 2}), 8)  # a dense model: just more data


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("axes", (TENSOR,), r"train.experts.axes: \[tensor\] is not one of \[expert\], \[expert, tensor\], \[expert, seq, tensor\]$"),
        ("dispatch", "alltoall", r"train.experts.dispatch: 'alltoall' is not one of ragged, capacity, gather"),
        ("buffer_factor", 0.5, r"train.experts.buffer_factor: 0.5 must be at least 1"),
        ("buffer_factor", float("inf"), r"train.experts.buffer_factor: inf must be .* finite$"),
        ("capacity_factor", float("inf"), r"train.experts.capacity_factor: inf must be .* finite$"),
        ("capacity_factor", 0.0, r"train.experts.capacity_factor: 0.0 must be positive"),
        ("chunks", 0, r"train.experts.chunks: 0 must be at least 1"),
        ("priority", "first", r"train.experts.priority: 'first' is not one of position, weight"),
    ],
)
def test_experts_section_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**{field: value})


def test_check_run_takes_what_only_looks_odd():
    check_run(changed(data={"sequence": 127}, train={"sequence_parallel": False}), 8)
    check_run(changed(mesh={"data": 1, "seq": 4}, train={"context": ContextConfig(method="usp")}), 8)
    check_run(changed(train={"context": ContextConfig(method="usp", ulysses=3)}), 8)  # without mesh.seq it does not matter
    check_run(changed(mesh={"data": 1, "tensor": 8}), 8)  # 4 key/value heads on 8 devices: replicated in pairs
    check_run(changed(data={"source": "tokens", "path": "x", "vocabulary": 4096}), 8)


def test_float64_needs_64_bit_types():
    config = changed(train={"compute_dtype": "float64"})
    check_run(config, 8)
    with jax.enable_x64(False), pytest.raises(ValueError, match="train.compute_dtype: float64 needs 64-bit types"):
        check_run(config, 8)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(type="llama3", factor=2, original_length=32),
        RopeConfig(type="dynamic", factor=1.0, original_length=256, static_length=64),
    ],
)
def test_a_sequence_past_rope_is_a_warning(rope):
    with pytest.warns(UserWarning, match="data.sequence: 128 tokens reach past the 64"):
        check_run(changed(model={"rope": rope}), 8)
