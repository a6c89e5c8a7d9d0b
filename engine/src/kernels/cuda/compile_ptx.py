"""Compiles the CUDA kernels with NVRTC; no GPU is needed. `cargo xtask ptx` and its test run this program.

    compile_ptx.py LIBNVRTC FLAG… -- ARCHITECTURE OUT FILE.cu…
    compile_ptx.py LIBNVRTC FLAG… -- SOURCES OUTPUTS

The first form writes OUT/FILE.ptx for a virtual architecture (compute_80) or OUT/FILE.cubin for a real architecture
(sm_90, sm_90a). The second form writes the hashes of sources and of the files in the folder OUTPUTS to OUTPUTS/SOURCES. Kernels can
include, by name, the headers in the folder of this file and in its folder experimental.
"""

import ctypes
import hashlib
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


class Nvrtc:
    """The NVRTC calls that compilation needs."""

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
        """Returns the compiled program."""
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
        log = log.rstrip(bytes(1)).decode().strip()
        # C75xx: the compiler has put waits between products of warpgroups.
        if code != 0 or "C75" in log:
            sys.exit(f"{source.name} does not compile:\n{log}")
        if log:
            print(f"{source.name}: {log}", file=sys.stderr)
        if any("sm_" in option for option in options):
            return self.bytes_of("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        return self.bytes_of("nvrtcGetPTXSize", "nvrtcGetPTX", program).rstrip(bytes(1))


def main():
    library, *arguments = sys.argv[1:]
    split = arguments.index("--")
    flags, arguments = arguments[:split], arguments[split + 1:]
    nvrtc = Nvrtc(library)
    if arguments[0] == "SOURCES":
        write_sources(f"NVRTC {nvrtc.version()} {' '.join(flags)}", pathlib.Path(arguments[1]))
        return
    architecture, out, *sources = arguments
    headers = {path.name: path.read_bytes() for path in sorted(kernels("*.cuh"))}
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    suffix = ".cubin" if architecture.startswith("sm_") else ".ptx"
    for source in sorted(map(pathlib.Path, sources)):
        compiled = nvrtc.compile(source, headers, [f"--gpu-architecture={architecture}", *flags])
        (out / source.with_suffix(suffix).name).write_bytes(compiled)


def kernels(pattern):
    """Returns the files of kernels with a pattern."""
    return [*HERE.glob(pattern), *(HERE / "experimental").glob(pattern)]


def write_sources(compiler, outputs):
    """Writes the compiler and the hashes of all files; a test compares them with the files."""
    lines = [compiler]
    for path in [path for pattern in ["*.cu", "*.cuh"] for path in sorted(kernels(pattern))]:
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(HERE)}")
    for pattern in ["ptx/*.ptx", "sm_90/*.cubin", "sm_90a/*.cubin"]:
        for path in sorted(outputs.glob(pattern)):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{digest}  {path.relative_to(outputs)}")
    (outputs / "SOURCES").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
