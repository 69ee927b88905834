"""Reading a compiled program: bytes, loops, and collectives, of a small one by hand."""

import sys

from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import program

TEXT = """\
HloModule jit_step, is_scheduled=true

%fused_add (p.0: f32[256,1024], p.1: f32[256,1024]) -> f32[256,1024] {
  %p.0 = f32[256,1024]{1,0} parameter(0)
  %p.1 = f32[256,1024]{1,0} parameter(1)
  ROOT %add.1 = f32[256,1024]{1,0} add(%p.0, %p.1)
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
  ROOT %turned = bf16[1024,1024]{1,0} transpose(%a), dimensions={1,0}
}
"""
MIB = 2**20


def test_what_a_program_moves_and_communicates_in_all_turns_of_its_loop():
    parsed = program.parse(TEXT)
    kinds = program.bytes_by_kind(parsed)
    assert kinds["elementwise"] == 5 * 3 * MIB  # two operands and a result
    assert kinds["collectives"] == 5 * 2 * MIB
    assert kinds["copies"] == kinds["attention"] == 2 * 2 * MIB
    (found,) = program.collectives(parsed)
    assert found == {
        **{"kind": "all-reduce", "arrays": "f32[256,1024]", "bytes": MIB},
        **{"times": 5, "in_loop": True},
    }
    assert program.scatters(parsed) == ["f32[64,8]"]
    assert program.copies(parsed) == {"bf16[1024,1024]": 4 * MIB}
    assert program.largest(parsed, 2) == ["bf16[1024,1024]", "f32[256,1024]"]
