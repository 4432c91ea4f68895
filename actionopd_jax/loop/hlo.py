"""Reads the collectives out of a compiled program's text: kind, how often each runs, how many bytes it delivers."""

import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{\s*$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_ARRAY = re.compile(r"(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0}


@dataclasses.dataclass(frozen=True)
class Collective:
    """Of one kind in one program, per device: executions, and bytes of their results."""

    count: int
    num_bytes: int


def collectives(text: str) -> dict[str, Collective]:
    """Collectives of a compiled program; what a loop does counts as often as the loop says it runs, else once.

    Args:
        text: `jax.stages.Compiled.as_text()`.
    """
    entry, computations = _computations(text)
    found: dict[str, Collective] = {}

    def visit(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            match = _OPERATION.match(line)
            if match is None:
                continue
            result, operation, rest = match.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                before = found.get(kind, Collective(0, 0))
                size = _result_bytes(result, is_start=operation.endswith("-start"))
                found[kind] = Collective(before.count + times, before.num_bytes + times * size)
                continue  # what it applies adds or compares two numbers
            trips = _TRIPS.search(rest)
            inner = times * int(trips.group(1)) if operation == "while" and trips else times
            called = _CALLED.findall(rest)
            for branches in _BRANCHES.findall(rest):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for each in called:
                visit(each, inner)

    visit(entry, 1)
    return found


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    entry, name = "", ""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header.group(2)
            lines[name] = []
            entry = name if header.group(1) else entry
        elif name:
            lines[name].append(line)
    return entry, lines


def _result_bytes(shape: str, *, is_start: bool) -> int:
    """Bytes of a result; an asynchronous one is a tuple of operands and results, of which the later half counts."""
    sizes = [_bits(kind) // 8 * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in _ARRAY.findall(shape)]
    sizes = [size for size in sizes if size > 8] or sizes  # counters and tokens of asynchronous operations
    if is_start and shape.startswith("(") and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _bits(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return _BITS[kind] if kind in _BITS else int(digits.group()) if digits else 0
