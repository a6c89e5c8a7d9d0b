"""Compiles the CUDA kernels by NVRTC, which needs no device: `cargo xtask ptx` and its test run this.

    compile_ptx.py LIBNVRTC FLAG… -- ARCHITECTURE OUT FILE.cu…

Writes OUT/FILE.ptx and OUT/SOURCES (of a virtual architecture, compute_80) or OUT/FILE.cubin (of a
real one, sm_90). The headers are those beside this file, given by name.
"""

import ctypes
import hashlib
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


class Nvrtc:
    """The few calls that compiling takes."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def bytes_of(self, size_call, call, program):
        size = ctypes.c_size_t()
        self(size_call, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self(call, program, buffer)
        return buffer.raw

    def compile(self, source, headers, options):
        """The program's object, and what the compiler said of it."""
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        program = ctypes.c_void_p()
        self(
            "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(),
            source.name.encode(), len(headers), texts, names,
        )
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = self.library.nvrtcCompileProgram(program, len(options), flags)
        log = self.bytes_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
        if code != 0:
            sys.exit(f"{source.name} does not compile:\n{log.rstrip(bytes(1)).decode()}")
        if any("sm_" in option for option in options):
            return self.bytes_of("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        return self.bytes_of("nvrtcGetPTXSize", "nvrtcGetPTX", program).rstrip(bytes(1))


def main():
    library, *arguments = sys.argv[1:]
    split = arguments.index("--")
    flags, (architecture, out, *sources) = arguments[:split], arguments[split + 1:]
    headers = {path.name: path.read_bytes() for path in sorted(HERE.glob("*.cuh"))}
    nvrtc = Nvrtc(library)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    suffix = ".cubin" if architecture.startswith("sm_") else ".ptx"
    sources = sorted(map(pathlib.Path, sources))
    for source in sources:
        compiled = nvrtc.compile(source, headers, [f"--gpu-architecture={architecture}", *flags])
        (out / source.with_suffix(suffix).name).write_bytes(compiled)
    if suffix == ".ptx":
        write_sources(out, sources, f"NVRTC {nvrtc.version()} {architecture} {' '.join(flags)}")


def write_sources(out, sources, made):
    """What the PTX was made with and of: a test compares it with what is there."""
    lines = [made]
    for path in [*sources, *sorted(HERE.glob("*.cuh")), *sorted(out.glob("*.ptx"))]:
        name = f"ptx/{path.name}" if path.suffix == ".ptx" else path.name
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}")
    (out / "SOURCES").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
