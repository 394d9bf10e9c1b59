"""From a kernel written in Python to relocatable machine code that needs neither Numba nor Python to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

ENTRY = "normkit_kernel"
SHORT = "normkit_short"

Word = int | tuple[int, int]


def with_short_block(function: Callable[[Any], None], words: Sequence[Word]) -> Callable[[Any], None]:
    """Say how a kernel's argument block follows from a shorter one, which costs the caller less to pack.

    Args:
        function: the kernel.
        words: one a word of the full block: a constant's 64 bits, or (i, factor) for word i of the short block.
    """
    vars(function)[_WORDS] = tuple(words)
    return function


_WORDS = "short_block"


def compile_kernel(function: Callable[[Any], None]) -> bytes:
    """Compile ``function(address of the argument block)`` with Numba and return an object file.

    Its symbols are `ENTRY`, and `SHORT`, which takes the short block of `with_short_block` where there is one.
    """
    machine = target_machine()
    return machine.emit_object(_linked(function, machine))


def assembly_of(function: Callable[[Any], None], machine: Any = None) -> str:
    """Return the assembly of what `compile_kernel` makes: for reading, and for the test that reads it.

    Args:
        function: as for `compile_kernel`.
        machine: an llvmlite target machine; this very processor's by default.
    """
    machine = machine or target_machine()
    return machine.emit_assembly(_linked(function, machine))


def _linked(function: Callable[[Any], None], machine: Any) -> Any:
    """Return the optimised LLVM module with the entry points.

    Numba's own module carries error paths that call back into Python; here they are unreachable (no exception is raised
    in a kernel), so linking a plain entry point and dropping what it does not reach leaves pure machine code.
    """
    import llvmlite.binding as llvm
    from numba.core import types
    from numba.core.compiler import Flags, compile_extra
    from numba.core.registry import cpu_target

    flags: Any = Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    result = compile_extra(
        cpu_target.typing_context, cpu_target.target_context, function, (types.intp,), types.void, flags, {}
    )
    module = llvm.parse_assembly(str(result.library._final_module))
    name = result.fndesc.mangled_name
    entry = f'''
target triple = "{module.triple}"
declare i32 @"{name}"(ptr, ptr, i64)
define void @{ENTRY}(i64 %block) {{
  %unused = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{name}"(ptr %unused, ptr %error, i64 %block)
  ret void
}}
{_short_entry(vars(function).get(_WORDS, ()))}'''
    module.link_in(llvm.parse_assembly(entry))
    for function_ref in module.functions:
        if not function_ref.is_declaration and function_ref.name not in (ENTRY, SHORT):
            function_ref.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return module


def _short_entry(words: Sequence[Word]) -> str:
    """Return LLVM code that writes out the full block on the stack and enters the kernel with it."""
    lines = [f"define void @{SHORT}(i64 %block) {{", f"  %full = alloca [{max(len(words), 1)} x i64]"]
    for i, word in enumerate(words):
        value = str(word)
        if not isinstance(word, int):
            index, factor = word
            lines += [
                f"  %from{i} = add i64 %block, {8 * index}",
                f"  %at{i} = inttoptr i64 %from{i} to ptr",
                f"  %word{i} = load i64, ptr %at{i}",
                f"  %value{i} = mul i64 %word{i}, {factor}",
            ]
            value = f"%value{i}"
        lines += [f"  %to{i} = getelementptr i64, ptr %full, i64 {i}", f"  store i64 {value}, ptr %to{i}"]
    lines += [
        "  %address = ptrtoint ptr %full to i64",
        f"  call void @{ENTRY}(i64 %address) noinline",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def target_machine() -> Any:
    """Return code generation for this very processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc="pic")
