// Parses an image of kernels as a driver does: PTX as text, or a cubin (ELF).

#pragma once
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "run.h"

namespace emulate {

// Attributes of a kernel that limit its launches.
struct KernelInfo {
    u32 param_bytes = 0;
    u32 threads_max = 1024;  // .maxntid
    u32 static_shared_bytes = 0;
    u32 registers = 0;  // per thread
};

struct Image {
    std::map<std::string, KernelInfo> kernels;
    u32 architecture = 0;  // 10 * major + minor
    u32 ptx_version = 0;   // 10 * major + minor; 0 for a cubin
};

// Returns the largest number of registers that a compiler may give a thread of a block of `threads` threads.
inline u32 registers_max(u32 threads) {
    u32 most = 65536 / threads / 8 * 8;
    return most < 255 ? most : 255;
}

// Returns the bytes up to the end of a declaration such as `.shared .align 4 .b8 name[128];` that follows `before`
// bytes, with its alignment.
inline u32 declared_bytes(const std::string& line, u32 before) {
    u32 element = line.find(".b8 ") != line.npos ? 1 : line.find("64 ") != line.npos ? 8 : 4;
    size_t align = line.find(".align "), open = line.find('[');
    u32 alignment = align == line.npos ? element : u32(atoi(line.c_str() + align + 7));
    u32 count = open == line.npos ? 1 : u32(atoi(line.c_str() + open + 1));
    return (before + alignment - 1) / alignment * alignment + element * count;
}

// Parses PTX, line by line: `.version 8.1`, `.target sm_80`, the kernels and their declarations.
inline Image parse_ptx(const std::string& text) {
    Image image;
    KernelInfo* kernel = nullptr;
    u32 shared_by_all = 0;
    for (size_t start = 0; start < text.size();) {
        size_t end = std::min(text.find('\n', start), text.size());
        std::string line = text.substr(start, end - start);
        start = end + 1;
        size_t first = line.find_first_not_of(" \t");
        if (first == line.npos || line[first] != '.') {
            if (line == "}") kernel = nullptr;
            continue;
        }
        line = line.substr(first);
        auto is = [&](const char* word) { return line.compare(0, strlen(word), word) == 0; };
        if (is(".version ")) image.ptx_version = u32(atof(line.c_str() + 9) * 10 + 0.5);
        if (is(".target sm_")) image.architecture = u32(atoi(line.c_str() + 11));
        if (is(".visible .entry ")) {
            kernel = &image.kernels[line.substr(16, line.find('(') - 16)];
            kernel->static_shared_bytes = shared_by_all;
            kernel->registers = registers_max(kernel->threads_max);
        }
        if (is(".shared ")) {
            u32& bytes = kernel ? kernel->static_shared_bytes : shared_by_all;
            bytes = declared_bytes(line, bytes);
        }
        if (!kernel) continue;
        if (is(".param ")) kernel->param_bytes = declared_bytes(line, kernel->param_bytes);
        if (is(".maxntid ")) {
            kernel->threads_max = u32(atoi(line.c_str() + 9));
            kernel->registers = registers_max(kernel->threads_max);
        }
        if (is(".maxnreg ")) kernel->registers = u32(atoi(line.c_str() + 9));
    }
    return image;
}

// An ELF file. Offsets are not checked, because the files come from NVRTC.
struct Elf {
    const u8* bytes;
    template <class T> T at(size_t offset) const {
        T value;
        memcpy(&value, bytes + offset, sizeof value);
        return value;
    }
    struct Section {
        u32 name, type;
        u64 flags, address, offset, size;
        u32 link, info;
        u64 alignment, entry_size;
    };
    Section section(u32 index) const { return at<Section>(at<u64>(0x28) + 64 * index); }
    u32 section_count() const { return at<u16>(0x3c); }
    std::string text(u64 table, u32 name) const { return reinterpret_cast<const char*>(bytes + table + name); }
};

// Calls `each(code, value, offset of data)` for the entries of a .nv.info section.
template <class Each> void each_attribute(const Elf& elf, const Elf::Section& section, Each each) {
    for (u64 at = section.offset; at < section.offset + section.size;) {
        u8 format = elf.at<u8>(at), code = elf.at<u8>(at + 1);
        u16 value = elf.at<u16>(at + 2);
        each(code, value, at + 4);
        at += format == 4 ? 4 + value : 4;
    }
}

// Codes of attributes: registers of a kernel; threads per block; bytes of parameters.
constexpr u8 REGISTER_COUNT = 0x2f, THREADS_MAX_OF = 0x05, PARAM_BYTES = 0x19;

inline Image parse_cubin(const u8* bytes) {
    Elf elf{bytes};
    Image image;
    image.architecture = elf.at<u32>(0x30) & 0xff;
    u64 names = elf.section(elf.at<u16>(0x3e)).offset, symbols = 0, symbol_names = 0;
    auto each_section = [&](auto visit) {
        for (u32 i = 0; i < elf.section_count(); i++) visit(elf.section(i), elf.text(names, elf.section(i).name));
    };
    each_section([&](const Elf::Section& section, const std::string& name) {
        if (name == ".symtab") symbols = section.offset;
        if (name == ".strtab") symbol_names = section.offset;
        if (name.compare(0, 6, ".text.") == 0) image.kernels[name.substr(6)];
    });
    each_section([&](const Elf::Section& section, const std::string& name) {
        if (name.compare(0, 11, ".nv.shared.") == 0) image.kernels[name.substr(11)].static_shared_bytes = u32(section.size);
        if (name.compare(0, 9, ".nv.info.") == 0) {
            KernelInfo& kernel = image.kernels[name.substr(9)];
            each_attribute(elf, section, [&](u8 code, u16 value, u64 at) {
                if (code == PARAM_BYTES) kernel.param_bytes = value;
                if (code == THREADS_MAX_OF) kernel.threads_max = elf.at<u32>(at);
            });
        } else if (name == ".nv.info") {
            each_attribute(elf, section, [&](u8 code, u16, u64 at) {
                if (code != REGISTER_COUNT) return;
                u32 symbol = elf.at<u32>(symbols + 24 * elf.at<u32>(at));
                auto kernel = image.kernels.find(elf.text(symbol_names, symbol));
                if (kernel != image.kernels.end()) kernel->second.registers = elf.at<u32>(at + 4);
            });
        }
    });
    return image;
}

}  // namespace emulate
