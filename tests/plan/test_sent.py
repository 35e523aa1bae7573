"""What a program sends beside what its formulas say, on a program with known lines."""

import re

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.plan import sent
from jaxpar.plan.traffic import Collective

MESH = Mesh(np.arange(8, dtype=object).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
TENSOR, DATA = "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


def gather(name, groups, source, frame):
    return (
        f"  %{name} = (f32[25]{{0}}, f32[100]{{0}}) all-gather-start(%p), {groups}, dimensions={{0}}, "
        f'metadata={{op_name="{source}" stack_frame_id={frame}}}, backend_config={{"collective_backend_config":{{"is_sync":false}}}}'
    )


TEXT = "\n".join(
    [
        "HloModule step",
        "",
        "FileNames",
        '1 "/home/somebody/jaxpar/parallel/collectives.py"',
        '2 "/usr/lib/python3/site-packages/optax/rule.py"',
        '3 "/home/somebody/jaxpar/parallel/sequence.py"',
        '4 "/home/somebody/jaxpar/models/attention.py"',
        '5 "/home/somebody/jaxpar/models/mlp.py"',
        "",
        "FileLocations",
        "1 {file_name_id=1 function_name_id=1 line=103 end_line=103 column=4 end_column=9}",
        "2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=4 end_column=9}",
        *(
            f"{number} {{file_name_id={file} function_name_id=1 line={line} end_line={line} column=4 end_column=9}}"
            for number, file, line in ((3, 3, 51), (4, 4, 56), (5, 5, 35))
        ),
        "",
        "StackFrames",  # parents are one too many, as XLA prints them: 5 is called by 4, 4 by 3
        "1 {file_location_id=2 parent_frame_id=1}",
        "2 {file_location_id=5 parent_frame_id=1}",
        "3 {file_location_id=4 parent_frame_id=1}",
        "4 {file_location_id=3 parent_frame_id=4}",
        "5 {file_location_id=1 parent_frame_id=5}",
        "6 {file_location_id=3 parent_frame_id=3}",
        "7 {file_location_id=1 parent_frame_id=7}",
        "",
        "",
        "ENTRY %main (p: f32[25]) -> f32[25] {",
        "  %p = f32[25]{0} parameter(0)",
        gather("a", TENSOR, "jit(step)/all_gather", 5),
        gather("b", TENSOR, "jit(step)/all_gather", 7),
        gather("c", DATA, "jit(step)/rule", 1),
        "  ROOT %r = f32[25]{0} negate(%p)",
        "}",
        "",
    ]
)


def formula(axes, group, size):
    return Collective("all_gather", axes, group, 1, size, 0, "float32", False, "")


def test_equal_rows_and_nothing_unexpected():
    rows, unexpected = sent.compare(TEXT, MESH, [formula(("tensor",), 4, 600), formula(("data",), 2, 100)])
    assert rows == [
        {"axis": "data", "kind": "all_gather", "asynchronous": True, "count": 1, "bytes": 100, "expected_bytes": 100},
        {"axis": "tensor", "kind": "all_gather", "asynchronous": True, "count": 2, "bytes": 600, "expected_bytes": 600},
    ]
    assert unexpected == []


def test_what_the_formulas_do_not_have_is_listed_with_its_line():
    rows, unexpected = sent.compare(TEXT, MESH, [formula(("tensor",), 4, 500)])
    assert {(row["axis"], row["expected_bytes"]) for row in rows} == {("tensor", 500), ("data", 0)}
    assert unexpected == [
        {
            "axis": "tensor",
            "kind": "all_gather",
            "count": 2,
            "bytes": 100,
            "source": "jaxpar/parallel/sequence.py:51 in jaxpar/models/attention.py:56 (jit(step)/all_gather)"
            " or jaxpar/parallel/sequence.py:51 in jaxpar/models/mlp.py:35 (jit(step)/all_gather)",
        },
        {"axis": "data", "kind": "all_gather", "count": 1, "bytes": 100, "source": "optax/rule.py:7 (jit(step)/rule)"},
    ]


def test_what_only_the_formulas_have_is_a_row_of_zero():
    rows, unexpected = sent.compare(
        TEXT, MESH, [formula(("tensor",), 4, 600), formula(("data",), 2, 100), formula(("data", "tensor"), 8, 9)]
    )
    assert {"axis": "data+tensor", "kind": "all_gather", "asynchronous": False, "count": 0, "bytes": 0, "expected_bytes": 9} in rows
    assert unexpected == []
    assert [(row["axis"], row["expected_bytes"]) for row in sent.missing(rows)] == [("data+tensor", 9)]


def test_what_no_formula_has_is_listed_by_line():
    """Two lines with one name of JAX's are told apart."""
    unexpected = sent.compare(TEXT, MESH, [formula(("data",), 2, 100)])[1]
    assert [(each["bytes"], each["source"].split(" in ")[1].split(":")[0]) for each in unexpected] == [
        (300, "jaxpar/models/attention.py"),
        (300, "jaxpar/models/mlp.py"),
    ]


def test_frames_whose_parents_are_not_shifted():
    """As the proto has them, nought where there is none."""
    plain = re.sub(r"parent_frame_id=(\d+)", lambda found: f"parent_frame_id={int(found[1]) - 1}", TEXT)
    assert sent.sources(plain) == sent.sources(TEXT)
    assert sent.sources(TEXT)["5"] == "jaxpar/parallel/sequence.py:51 in jaxpar/models/attention.py:56"


def test_a_program_without_frames():
    text = re.sub(r" stack_frame_id=\d+", "", TEXT).replace("StackFrames", "Nothing")
    assert {each["source"] for each in sent.compare(text, MESH, [])[1]} == {"jit(step)/all_gather", "jit(step)/rule"}


def test_what_xla_added_is_told_from_what_was_asked_for():
    """What went through no wrapper is the only suspect of an excess that it explains; of a larger one all are."""
    added = TEXT.replace(gather("c", DATA, "jit(step)/rule", 1), gather("c", TENSOR, "jit(step)/rule", 1))
    assert sent.compare(added, MESH, [formula(("tensor",), 4, 600)])[1] == [
        {"axis": "tensor", "kind": "all_gather", "count": 1, "bytes": 300, "source": "optax/rule.py:7 (jit(step)/rule)"}
    ]
    (part,) = sent.compare(added, MESH, [formula(("tensor",), 4, 800)])[1]
    assert (part["bytes"], part["source"]) == (100, "optax/rule.py:7 (jit(step)/rule)")
    (all_of_them,) = sent.compare(added, MESH, [formula(("tensor",), 4, 500)])[1]
    assert (all_of_them["bytes"], all_of_them["count"], all_of_them["source"].count(" or ")) == (400, 3, 2)
