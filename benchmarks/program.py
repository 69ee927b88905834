"""Read a compiled program: what it moves, what it communicates, and how often.

The functions take what `compiled.as_text()` gives, parsed by `parse`. An instruction in the
body of a loop counts as often as the loop runs.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
COLLECTIVES = "all-reduce all-gather reduce-scatter all-to-all collective-permute"
COLLECTIVES = COLLECTIVES.split() + ["ragged-all-to-all"]
# What only names or selects: nothing is read or written.
FREE = "parameter get-tuple-element tuple bitcast constant iota after-all partition-id"
FREE = FREE.split() + ["replica-id", "opt-barrier"]
# A fusion of nothing else moves an array without computing.
MOVES = (
    "copy transpose slice dynamic-slice concatenate pad dynamic-update-slice broadcast"
)
MOVES = MOVES.split() + ["reshape", "reverse", *FREE]


class Instruction(NamedTuple):
    name: str
    type: str  # such as "(f32[2,3]{1,0}, bf16[4]{0})"
    op: str
    text: str  # from the operands on
    operands: tuple[str, ...]


class Program(NamedTuple):
    computations: dict[str, dict[str, Instruction]]
    entry: str


class Executed(NamedTuple):
    instruction: Instruction
    operands: list[Instruction]
    times: int  # in a step
    in_loop: bool


def bytes_of(types: str) -> int:
    """The bytes of the arrays in a type, such as "(f32[2,3], bf16[4])"."""
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in filter(None, shape.split(",")))
        for dtype, shape in ARRAY.findall(types)
    )


def shapes_of(types: str) -> str:
    """The arrays of a type without their layouts."""
    return " ".join(f"{dtype}[{shape}]" for dtype, shape in ARRAY.findall(types))


def parse(text: str) -> Program:
    """The computations of a program, each as its instructions by name."""
    computations, entry, current = {}, "", {}
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)$", line):
            name, rest = found.groups()
            end = end_of_type(rest)
            if call := re.match(r"\s*([\w-]+)(\(.*)$", rest[end:]):
                names = re.match(r"\(([^)]*)\)", call[2])
                operands = re.findall(r"%([\w.-]+)", names[1]) if names else []
                current[name] = Instruction(
                    name, rest[:end], call[1], call[2], tuple(operands)
                )
    return Program(computations, entry)


def end_of_type(text: str) -> int:
    """Where the type that `text` begins with ends."""
    if not text.startswith("("):
        return text.index(" ")
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"no type at the start of {text:.60}")


def executed(
    program: Program, name: str = "", times: int = 1, in_loop: bool = False
) -> Iterator[Executed]:
    """Every instruction that runs in a step, from the entry or from what it calls.

    Of the branches of a conditional, the one that moves the most.
    """
    body = program.computations[name or program.entry]
    for instruction in body.values():
        if instruction.op == "while":
            text = instruction.text
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', text)
            inner = re.search(r"body=%?([\w.-]+)", text)[1]
            trips = int(trips[1]) if trips else 1
            yield from executed(program, inner, times * trips, in_loop=True)
        elif instruction.op == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.text)
            pair = r"(?:true|false)_computation=%?([\w.-]+)"
            names = (
                re.findall(r"%?([\w.-]+)", branches[1])
                if branches
                else re.findall(pair, instruction.text)
            )
            runs = [list(executed(program, n, times, in_loop)) for n in names]
            yield from max(
                runs, key=lambda run: sum(bytes_moved(program, e) for e in run)
            )
        elif instruction.op == "call":
            inner = re.search(r"to_apply=%?([\w.-]+)", instruction.text)[1]
            yield from executed(program, inner, times, in_loop)
        elif instruction.op not in FREE and not instruction.op.endswith("-done"):
            operands = [body[o] for o in instruction.operands if o in body]
            yield Executed(instruction, operands, times, in_loop)


def called(program: Program, instruction: Instruction) -> list[Instruction]:
    """The instructions in a fusion."""
    found = re.search(r"calls=%?([\w.-]+)", instruction.text)
    return list(program.computations.get(found[1], {}).values()) if found else []


def bytes_moved(program: Program, each: Executed) -> int:
    """Bytes that an instruction reads and writes in a step: its operands and results.

    Where only slices of an operand are read, or a slice of it is replaced in place, these
    count. An upper estimate, to compare programs by: caches keep some of it.
    """
    users = called(program, each.instruction) or [each.instruction]
    outside = [i for i in users if i.op == "parameter"] or each.operands
    inside = {i.name: i for i in [*outside, *users]}
    result = users[-1]

    def in_place(result: Instruction) -> set[str]:
        if result.op in ("tuple", "bitcast") and len(users) > 1:
            return set().union(*(in_place(inside[name]) for name in result.operands))
        return {result.name} if result.op == "dynamic-update-slice" else set()

    def read(source: Instruction, whole: int) -> int:
        uses = [i for i in users if source.name in i.operands]
        return min(whole, sum(read_by(use, source, whole) for use in uses))

    def read_by(use: Instruction, source: Instruction, whole: int) -> int:
        if use.op == "bitcast":
            return read(use, whole)
        if use.op in ("slice", "dynamic-slice"):
            return bytes_of(use.type)
        replaced = use.name in updates and use.operands[0] == source.name
        return 0 if replaced else whole

    def written(result: Instruction) -> int:
        if result.op == "tuple":
            return sum(written(inside[name]) for name in result.operands)
        if result.op == "bitcast":
            return written(inside[result.operands[0]])
        if result.op == "dynamic-update-slice":
            return bytes_of(inside[result.operands[1]].type)
        return bytes_of_result(result, each.operands)

    updates = in_place(result)
    total = sum(read(source, bytes_of(source.type)) for source in outside)
    return each.times * (total + written(result))


def bytes_of_result(instruction: Instruction, operands: list[Instruction]) -> int:
    """The bytes that an instruction gives; most starts list their operands, too."""
    size = bytes_of(instruction.type)
    if instruction.op.endswith("-start") and instruction.op != "all-reduce-start":
        size -= sum(bytes_of(operand.type) for operand in operands)
    return size


def kind_of(program: Program, each: Executed) -> str:
    """What an instruction does, in words."""
    instruction = each.instruction
    if instruction.op == "custom-call":
        target = re.search(r'custom_call_target="([^"]+)"', instruction.text)[1]
        if "fmha" in target:
            return "attention"
        return "products" if "gemm" in target or "cublas" in target else target
    if collective_of(instruction):
        return "collectives"
    inside = called(program, instruction)
    ops = {i.op for i in inside} or {instruction.op.removesuffix("-start")}
    if ops & {"dot", "convolution"}:
        return "products"
    if ops & {"scatter"}:
        return "scatters"
    if ops <= {*MOVES}:
        return "copies"
    widest = max((bytes_of(i.type) for i in inside), default=0)
    reduces = "reduce" in ops and bytes_of(instruction.type) < widest
    return "reductions" if reduces else "elementwise"


def collective_of(instruction: Instruction) -> str | None:
    """Which collective an instruction is or starts."""
    op = instruction.op.removesuffix("-start")
    if op == "async":
        return next((c for c in COLLECTIVES if c in instruction.text), None)
    return op if op in COLLECTIVES else None


def bytes_by_kind(program: Program) -> dict[str, int]:
    """Bytes that a step reads and writes, by kind of instruction, the most first."""
    total = collections.Counter()
    for each in executed(program):
        total[kind_of(program, each)] += bytes_moved(program, each)
    return dict(total.most_common())


def collectives(program: Program) -> list[dict]:
    """Every collective: its kind, its arrays, its result's bytes, how often it runs."""
    found = []
    for each in executed(program):
        if kind := collective_of(each.instruction):
            arrays = each.instruction.type
            found.append(
                {
                    "kind": kind,
                    "arrays": shapes_of(arrays),
                    "bytes": bytes_of_result(each.instruction, each.operands),
                    "times": each.times,
                    "in_loop": each.in_loop,
                }
            )
    return sorted(found, key=lambda c: -c["bytes"] * c["times"])


def scatters(program: Program) -> list[str]:
    """The arrays that the program scatters into."""
    return [
        shapes_of(instruction.type)
        for body in program.computations.values()
        for instruction in body.values()
        if instruction.op == "scatter"
    ]


def largest(program: Program, count: int = 5) -> list[str]:
    """The arrays with the most bytes that the program writes."""
    sizes = {}
    for each in executed(program):
        for array in shapes_of(each.instruction.type).split():
            sizes[array] = bytes_of(array)
    return sorted(sizes, key=sizes.get, reverse=True)[:count]


def copies(program: Program, least: int = 2**20) -> dict[str, int]:
    """Bytes read and written by what moves arrays and computes nothing, by their shapes.

    Args:
        least: smaller arrays don't count.
    """
    total = collections.Counter()
    for each in executed(program):
        large = bytes_of(each.instruction.type) >= least
        if large and kind_of(program, each) == "copies":
            total[shapes_of(each.instruction.type)] += bytes_moved(program, each)
    return dict(total.most_common())
