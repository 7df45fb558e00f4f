"""Compiles every GPU kernel for sm_80, sm_90 and sm_100, without a GPU, and looks at the result.

    python -m tests.ops.compile_kernels [--arch 90] [NAME ...]

For each kernel: registers per thread, bytes spilled (must be 0), shared memory, and the widest
load from global memory. Pointers are taken as aligned to 16 bytes, as torch's are. Needs Triton,
not its interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.ops.adapted_gpu import tiles as adapted_tiles
from tandem.ops.continued_gpu import part_tiles
from tandem.ops.varlen_gpu import tiles

ARCHS = (80, 90, 100)


@dataclass(frozen=True)
class Case:
    """A kernel with the types and constants of one launch, and what its code must be like."""

    name: str
    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    load_bits: int = 128
    max_registers: int = 255
    options: dict[str, Any] = field(default_factory=dict)


def _pointers(kind: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*" + kind for name in names}


_NORM = _pointers("bf16", "x", "delta", "weight", "bias", "summed", "normed") | {"eps": "fp32"}
_BACK = _pointers("bf16", "h", "of_norm", "of_sum", "weight", "made") | {
    "sums_ptr": "*fp32", "eps": "fp32",
}  # fmt: skip
_DRAW = {
    **_pointers("bf16", "logits", "drawn"), "keys_ptr": "*i64", "ages_ptr": "*i64",
    "stops_ptr": "*i64", "sums_ptr": "*fp32", "tokens_ptr": "*i64", "numbers_ptr": "*fp32",
    "inverse": "fp32", "top_p": "fp32", "min_p": "fp32",
}  # fmt: skip
_PAGED = {
    **_pointers("bf16", "q", "k", "v", "cos", "sin"), "keys_ptr": "*i64", "values_ptr": "*i64",
    "tables_ptr": "*i32", "positions_ptr": "*i64", "sums_ptr": "*fp32", "tops_ptr": "*fp32",
    "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
_PAGED_CONSTANTS = {
    "GROUP_PAD": 16, "CHUNK_TOKENS": 256, "TILE": 64, "BLOCK": 16, "WINDOW": 0, "CAPPED": False,
    "K_WIDTH": 128, "K_PAD": 128, "V_WIDTH": 128, "V_PAD": 128, "BY_ADDRESS": True,
}  # fmt: skip
_PAGED_ALIGNED = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "table_row")
_PACKED = {"x_ptr": "*bf16", "codes_ptr": "*u8", "out_ptr": "*bf16", "table_ptr": "*fp32"}


def _packed_attention(kind: str) -> dict[str, str]:
    return _pointers(kind, "q", "k", "v", "g") | _pointers("fp32", "sums", "inner") | {
        "ends_ptr": "*i32", "scale": "fp32", "softcap": "fp32",
    }  # fmt: skip


def _tiles(kind: str, width: int, kernel: str) -> tuple[int, int]:
    return tiles(width, 2 if kind == "bf16" else 4, kernel)


def _part_tiles(kind: str, width: int) -> tuple[int, int]:
    return part_tiles(width, 2 if kind == "bf16" else 4)


_ADAPTED = {
    **_pointers("bf16", "x", "w0", "w1", "w2", "unit0", "unit1", "unit2", "bias0", "bias1",
                "bias2", "out"),
    **_pointers("fp32", "a0", "a1", "a2", "b0", "b1", "b2", "table"),
    **dict.fromkeys(("scale0", "scale1", "scale2"), "fp32"),
}  # fmt: skip


def _adapted(name: str, rows: int, rank: int, kind: int, block: int, **types: str) -> Case:
    tile, outputs, step, warps, stages = adapted_tiles(rows, rank, kind, block)
    constants = {
        "INPUTS": 4096, "BIASED": False, "IN_PARTS": True, "KIND": kind, "BLOCK": block,
        "ROWS": tile, "OUTPUTS": outputs, "STEP": step, "RANK_PAD": rank,
    }  # fmt: skip
    given = {f"{part}{i}_ptr": kind for part, kind in types.items() for i in range(3)}
    sizes = tuple(f"{part}{i}" for part in ("size", "rank") for i in range(3))
    return Case(f"adapters{name} of rank {rank}, {rows} rows", "adapted_gpu", "_adapted_rows",
                _ADAPTED | given, constants, sizes, warps, stages)  # fmt: skip


CASES = [
    *(_adapted("", rows, rank, 3, 1)
      for rows, rank in ((16, 16), (64, 16), (64, 32), (16, 64), (64, 64))),
    *(_adapted(" on NF4", rows, rank, 2, 64, w="*u8")
      for rows, rank in ((16, 16), (64, 16), (16, 64), (64, 64))),
    *(_adapted(" on int8", rows, rank, 0, 256, w="*u8", unit="*fp32")
      for rows, rank in ((16, 16), (64, 16), (16, 64), (64, 64))),
    Case("add + RMSNorm", "layer_gpu", "_norm_rows", _NORM,
         {"WIDTH": 4096, "PAD": 4096, "ADDS": True, "KIND": 0, "BIASED": False}, warps=8),
    Case("add + LayerNorm", "layer_gpu", "_norm_rows", _NORM,
         {"WIDTH": 2048, "PAD": 2048, "ADDS": True, "KIND": 2, "BIASED": True}, warps=4),
    Case("RMSNorm backward", "layer_gpu", "_norm_rows_backward", _BACK,
         {"WIDTH": 4096, "PAD": 4096, "KIND": 0, "ADDS": True, "TRAINS": True, "PARTS": 256},
         warps=8),
    Case("LayerNorm backward", "layer_gpu", "_norm_rows_backward", _BACK,
         {"WIDTH": 2048, "PAD": 2048, "KIND": 2, "ADDS": True, "TRAINS": True, "PARTS": 256}),
    Case("SwiGLU", "layer_gpu", "_gate_rows",
         _pointers("bf16", "gate_up", "gradient", "made", "out"),
         {"WIDTH": 11008, "KIND": 0, "BACKWARD": False, "KEEPS": True, "BLOCK": 1024}),
    Case("SwiGLU backward", "layer_gpu", "_gate_rows",
         _pointers("bf16", "gate_up", "gradient", "made", "out"),
         {"WIDTH": 11008, "KIND": 0, "BACKWARD": True, "KEEPS": True, "BLOCK": 1024}),
    Case("GeGLU backward", "layer_gpu", "_gate_rows",
         _pointers("bf16", "gate_up", "gradient", "made", "out"),
         {"WIDTH": 8192, "KIND": 1, "BACKWARD": True, "KEEPS": True, "BLOCK": 1024}),
    Case("rotary", "rotary_gpu", "_turn_heads",
         _pointers("bf16", "q", "k", "v", "cos", "sin", "out"),
         {"QUERY_HEADS": 32, "HEADS": 8, "WIDTH": 128, "PAD": 128, "TURNING": 128, "BLOCK": 16,
          "BACKWARD": False}, ("q_row", "k_row", "v_row")),
    Case("rotary backward", "rotary_gpu", "_turn_heads",
         _pointers("bf16", "q", "k", "v", "cos", "sin", "out"),
         {"QUERY_HEADS": 32, "HEADS": 8, "WIDTH": 128, "PAD": 128, "TURNING": 128, "BLOCK": 16,
          "BACKWARD": True}, ("q_row", "k_row", "v_row")),
    Case("attention, rotary, one to one", "paged_gpu", "_attend_chunk", _PAGED,
         _PAGED_CONSTANTS | {"HEADS": 32, "GROUP": 1, "TURNING": 128}, _PAGED_ALIGNED),
    Case("attention, rotary, grouped", "paged_gpu", "_attend_chunk", _PAGED,
         _PAGED_CONSTANTS | {"HEADS": 8, "GROUP": 4, "TURNING": 128}, _PAGED_ALIGNED),
    Case("attention", "paged_gpu", "_attend_chunk", _PAGED,
         _PAGED_CONSTANTS | {"HEADS": 32, "GROUP": 1, "TURNING": 0, "K_WIDTH": 64, "K_PAD": 64,
                             "V_WIDTH": 64, "V_PAD": 64}, _PAGED_ALIGNED),
    Case("merge", "paged_gpu", "_merge_chunks",
         {"sums_ptr": "*fp32", "tops_ptr": "*fp32", "positions_ptr": "*i64", "sinks_ptr": "*i64",
          "out_ptr": "*bf16"},
         {"HEADS": 8, "GROUP": 4, "CHUNK_TOKENS": 256, "WINDOW": 0, "V_WIDTH": 128, "V_PAD": 128,
          "SINKS": False}, warps=2, load_bits=32),
    Case("store", "store_gpu", "_store_token",
         _pointers("bf16", "k", "v", "keys", "values") | _pointers("i32", "tables", "ends"),
         {"STEPS": 6, "K_NUMBERS": 4096, "V_NUMBERS": 4096, "PAD": 4096, "BLOCK": 16},
         ("k_row", "v_row")),
    Case("sums of logits", "sampling_gpu", "_sum_chunks",
         _pointers("bf16", "logits", "drawn") | {"stops_ptr": "*i64", "ages_ptr": "*i64",
         "sums_ptr": "*fp32", "inverse": "fp32"},
         {"BOUND": False, "BANS": 1, "TWO": False, "CHUNK_LOGITS": 4096},
         ("row_logits", "row_drawn", "vocabulary"), warps=8),
    Case("draw", "sampling_gpu", "_draw_rows", _DRAW,
         {"BOUND": False, "BANS": 0, "TOP_K": False, "TOP_P": False, "MIN_P": False,
          "TRUNCATES": False, "CHUNK_LOGITS": 4096, "CHUNKS_PAD": 8},
         ("row_logits", "row_drawn", "vocabulary"), warps=8),
    Case("draw, top-k, top-p, min-p", "sampling_gpu", "_draw_rows", _DRAW,
         {"BOUND": False, "BANS": 1, "TOP_K": True, "TOP_P": True, "MIN_P": True,
          "TRUNCATES": True, "CHUNK_LOGITS": 4096, "CHUNKS_PAD": 32},
         ("row_logits", "row_drawn", "vocabulary"), warps=8),
    Case("NF4, written out", "quantized_gpu", "_unpack",
         {"codes_ptr": "*u8", "scales_ptr": "*bf16", "table_ptr": "*fp32", "out_ptr": "*bf16"},
         {"KIND": 2, "BLOCK": 64, "SIZE": 2048}, ("numel",), load_bits=32),
    Case("NF4, 16 rows", "quantized_gpu", "_packed_rows", _PACKED | {"scales_ptr": "*bf16"},
         {"INPUTS": 4096, "KIND": 2, "BLOCK": 64, "STEP": 128, "ROWS_PAD": 16, "OUTPUTS": 32},
         ("outputs",)),
    Case("NF4, 64 rows", "quantized_gpu", "_packed_rows", _PACKED | {"scales_ptr": "*bf16"},
         {"INPUTS": 4096, "KIND": 2, "BLOCK": 64, "STEP": 128, "ROWS_PAD": 64, "OUTPUTS": 32},
         ("outputs",)),
    Case("int8, 16 rows", "quantized_gpu", "_packed_rows", _PACKED | {"scales_ptr": "*fp32"},
         {"INPUTS": 4096, "KIND": 0, "BLOCK": 256, "STEP": 256, "ROWS_PAD": 16, "OUTPUTS": 32},
         ("outputs",)),
    *(
        Case(f"packed attention {kind} {name}", "varlen_gpu", kernel,
             _packed_attention(kind) | more,
             {"GROUP": 4, "WINDOW": 0, "CAPPED": True, "SIZE": _tiles(kind, width, part)[0],
              "K_WIDTH": width, "K_PAD": width, "V_WIDTH": width, "V_PAD": width,
              "ROWS_PAD": 32} | extra,
             ("q_row", "k_row", "v_row"), warps=_tiles(kind, width, part)[1], stages=2)
        for kind, width in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 64),
                            ("fp32", 128))
        for name, kernel, part, more, extra in (
            (f"{width}", "_forward", "forward",
             {"out_ptr": f"*{kind}", "sinks_ptr": f"*{kind}"}, {"SINKS": True}),
            (f"{width}, of queries", "_backward_queries", "queries", {"of_q_ptr": f"*{kind}"}, {}),
            (f"{width}, of keys", "_backward_keys", "keys",
             {"of_k_ptr": f"*{kind}", "of_v_ptr": f"*{kind}"}, {}),
        )
    ),
    *(
        Case(f"parts of prompts {kind} {width}", "continued_gpu", "_attend_tile",
             _pointers(kind, "q", "keys", "values", "out", "sinks")
             | {"tables_ptr": "*i32", "starts_ptr": "*i64", "ends_ptr": "*i32", "scale": "fp32",
                "softcap": "fp32"},
             {"SINKS": True, "HEADS": 8, "GROUP": 4, "BLOCK": 16, "WINDOW": 0, "CAPPED": True,
              "SIZE": _part_tiles(kind, width)[0], "K_WIDTH": width, "K_PAD": width,
              "V_WIDTH": width, "V_PAD": width, "ROWS_PAD": 32},
             ("q_row",), warps=_part_tiles(kind, width)[1], stages=2)
        for kind, width in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 64),
                            ("fp32", 128))
    ),
    Case("advantages", "advantages_gpu", "_scan_row",
         _pointers("fp32", "rewards", "values", "advantages", "returns")
         | {"mask_ptr": "*u8", "gamma": "fp32", "decay": "fp32"},
         {"BLOCK": 1024}, load_bits=32),
    Case("log-probs", "logprobs_gpu", "_read_row",
         {"logits_ptr": "*bf16", "targets_ptr": "*i64", "numbers_ptr": "*fp32", "inverse": "fp32"},
         {"BLOCK": 4096}, ("vocabulary",), warps=8),
    Case("log-probs backward", "logprobs_gpu", "_write_row",
         {"logits_ptr": "*bf16", "targets_ptr": "*i64", "made_ptr": "*bf16", "inverse": "fp32"}
         | _pointers("fp32", "sums", "entropy", "of_logprobs", "of_entropy"),
         {"ENTROPY": True, "BLOCK": 4096}, ("columns", "first"), warps=8),
    Case("tile of the vocabulary", "vocabulary_gpu", "_fold_tile",
         {"logits_ptr": "*bf16", "targets_ptr": "*i64", "numbers_ptr": "*fp32", "inverse": "fp32"},
         {"BLOCK": 4096}, ("columns", "first"), warps=8),
]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """What a compiled kernel is like."""

    registers: int
    spilled: int
    shared: int
    load_bits: int


def built(case: Case, arch: int) -> Built:
    """Compile a case for an architecture."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"tandem.ops.{case.module}"), case.kernel)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in case.constants else case.types.get(n, "i32") for n in names}
    aligned = {n for n in names if signature[n].startswith("*")} | set(case.aligned)
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    constants = {(names.index(n),): value for n, value in case.constants.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"enable_fp_fusion": True, "num_warps": case.warps, "num_stages": case.stages}
    made = compiled(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    registers, spilled = _resources(ptx)
    return Built(registers, spilled, made.metadata.shared, _widest_load(ptx))


def _resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled to memory, as the assembler tells them."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    assembler = get_ptxas(int(re.sub(r"\D", "", target[1])))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [assembler.path, "-v", f"-arch={target[1]}", str(path), "-o", f"{folder}/out"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, stores = (
        re.search(r"Used (\d+) registers", output),
        re.search(r"(\d+) bytes spill s", output),
    )
    assert used is not None, output
    return int(used[1]), int(stores[1]) if stores else 0


def _widest_load(ptx: str) -> int:
    """Bits that one instruction of a thread takes from global memory."""
    widest = 0
    for vector, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)", ptx):
        widest = max(widest, int(vector or 1) * int(bits))
    for size in re.findall(
        r"cp\.async\.c[ag]\.shared\.global[\w.:]* \[[^\]]+\], \[[^\]]+\], (\w+)", ptx
    ):
        widest = max(widest, int(size, 0) * 8)
    return widest


def main() -> int:
    """Print a table; 1 if a kernel is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, choices=ARCHS, action="append")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    failed = 0
    print(f"{'kernel':32} {'arch':>6} {'registers':>9} {'spilled':>7} {'shared':>7} {'load':>5}")
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        for arch in options.arch or ARCHS:
            result = built(case, arch)
            bad = (
                result.spilled > 0
                or result.registers > case.max_registers
                or result.load_bits < case.load_bits
                or result.shared > 100_000
            )
            failed += bad
            print(
                f"{case.name:32} sm_{arch:<3} {result.registers:9} {result.spilled:7} "
                f"{result.shared:7} {result.load_bits:5}{'  NOT AS IT MUST BE' if bad else ''}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
