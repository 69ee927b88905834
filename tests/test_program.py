"""Reading a compiled program: bytes, loops, and collectives, of a small one by hand."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import program

TEXT = """\
HloModule jit_step, is_scheduled=true

%fused_add (p.0: f32[256,1024], p.1: f32[256,1024]) -> f32[256,1024] {
  %p.0 = f32[256,1024]{1,0} parameter(0)
  %p.1 = f32[256,1024]{1,0} parameter(1)
  ROOT %add.1 = f32[256,1024]{1,0} add(%p.0, %p.1)
}

%fused_transpose (p.2: bf16[1024,1024]) -> bf16[1024,1024] {
  %p.2 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[1024,1024]{1,0} transpose(%p.2), dimensions={1,0}
}

%body (state: (s32[], f32[256,1024])) -> (s32[], f32[256,1024]) {
  %state = (s32[], f32[256,1024]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%state), index=0
  %x = f32[256,1024]{1,0} get-tuple-element(%state), index=1
  %sum = f32[256,1024]{1,0} all-reduce(%x), replica_groups={}, to_apply=%region
  %loop_add = f32[256,1024]{1,0} fusion(%sum, %x), kind=kLoop, calls=%fused_add
  ROOT %next = (s32[], f32[256,1024]{1,0}) tuple(%step, %loop_add)
}

ENTRY %main (a: bf16[1024,1024], b: f32[256,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %b = f32[256,1024]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[256,1024]{1,0}) tuple(%zero, %b)
  %loop = (s32[], f32[256,1024]{1,0}) while(%start), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %scattered = f32[64,8]{1,0} scatter(%b, %zero, %b), to_apply=%region
  %attend = bf16[1024,1024]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %turned = bf16[1024,1024]{1,0} fusion(%a), kind=kLoop, calls=%fused_transpose
}
"""
MIB = 2**20


@pytest.fixture(scope="module")
def parsed():
    return program.parse(TEXT)


def test_bytes_are_those_of_operands_and_results_in_every_turn(parsed):
    kinds = program.bytes_by_kind(parsed)
    assert kinds["elementwise"] == 5 * 3 * MIB
    assert kinds["collectives"] == 5 * 2 * MIB
    assert kinds["copies"] == kinds["attention"] == 2 * 2 * MIB


def test_collectives_say_how_often_they_run(parsed):
    assert program.collectives(parsed) == [
        {
            "kind": "all-reduce",
            "arrays": "f32[256,1024]",
            "bytes": MIB,
            "times": 5,
            "in_loop": True,
        }
    ]


def test_scatters_copies_and_the_largest_arrays(parsed):
    assert program.scatters(parsed) == ["f32[64,8]"]
    assert program.copies(parsed) == {"bf16[1024,1024]": 4 * MIB}
    assert program.largest(parsed, 2) == ["bf16[1024,1024]", "f32[256,1024]"]


SLICES = """\
HloModule jit_step, is_scheduled=true

%fused_update (p.0: bf16[48,1024,512], p.1: bf16[1024,512], p.2: s32[]) -> bf16[48,1024,512] {
  %p.0 = bf16[48,1024,512]{2,1,0} parameter(0)
  %p.1 = bf16[1024,512]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %row.1 = bf16[1,1024,512]{2,1,0} bitcast(%p.1)
  ROOT %updated.1 = bf16[48,1024,512]{2,1,0} dynamic-update-slice(%p.0, %row.1, %p.2)
}

ENTRY %main (a: bf16[48,1024,512], i: s32[]) -> bf16[48,1024,512] {
  %a = bf16[48,1024,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = bf16[1024,512]{1,0} dynamic-slice(%a, %i), dynamic_slice_sizes={1,1024,512}
  ROOT %new = bf16[48,1024,512]{2,1,0} fusion(%a, %row, %i), kind=kLoop, calls=%fused_update
}
"""


def test_a_slice_counts_as_what_is_read_of_it_and_an_update_as_what_is_written():
    moved = program.bytes_by_kind(program.parse(SLICES))["copies"]
    assert moved == pytest.approx((2 + 2) * MIB, abs=16)  # and the index


BRANCHES = """\
HloModule jit_step, is_scheduled=true

%skip (s: f32[256,1024]) -> f32[256,1024] {
  ROOT %s = f32[256,1024]{1,0} parameter(0)
}

%update (u: f32[256,1024]) -> f32[256,1024] {
  %u = f32[256,1024]{1,0} parameter(0)
  ROOT %sum = f32[256,1024]{1,0} all-reduce(%u), replica_groups={}, to_apply=%region
}

%doubled (d: f32[256,1024]) -> f32[256,1024] {
  %d = f32[256,1024]{1,0} parameter(0)
  %two = f32[256,1024]{1,0} constant(2)
  %new = f32[256,1024]{1,0} dynamic-update-slice(%d, %d, %zero)
  ROOT %twice = f32[256,1024]{1,0} multiply(%new, %new)
}

%buffer (b: f32[256,1024]) -> f32[2048,1024] {
  %b = f32[256,1024]{1,0} parameter(0)
  %start = (f32[256,1024]{1,0}, f32[2048,1024]{1,0}) all-gather-start(%b), dimensions={0}
  ROOT %done = f32[2048,1024]{1,0} all-gather-done(%start)
}

ENTRY %main (a: f32[256,1024], p: pred[]) -> f32[2048,1024] {
  %a = f32[256,1024]{1,0} parameter(0)
  %p = pred[] parameter(1)
  %chosen = f32[256,1024]{1,0} conditional(%p, %a, %a), \
branch_computations={%skip, %update}
  %more = f32[256,1024]{1,0} fusion(%chosen), kind=kLoop, calls=%doubled
  ROOT %all = f32[2048,1024]{1,0} call(%more), to_apply=%buffer
}
"""


def test_branches_and_calls_are_walked_and_are_no_loops():
    found = program.collectives(program.parse(BRANCHES))
    assert [(c["kind"], c["bytes"], c["in_loop"]) for c in found] == [
        ("all-gather", 8 * MIB, False),
        ("all-reduce", MIB, False),
    ]


def test_a_start_gives_its_result_alone_and_an_update_halfway_is_read_whole():
    kinds = program.bytes_by_kind(program.parse(BRANCHES))
    assert kinds["collectives"] == (1 + 8 + 1 + 1) * MIB
    assert kinds["elementwise"] == (1 + 1) * MIB
