#include "runtime/accelerator_conflict.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <unordered_set>

#include "runtime/device.h"

namespace quartz {
namespace {

using GetAccelerator = std::optional<c10::DeviceType> (*)(bool);
constexpr const char* kLibrary = "libtorch_cpu.so";
constexpr const char* kSymbol = "_ZN2at11accelerator14getAcceleratorEb";

// ------------------------------------------------------------------ the scope, carried by at::ThreadLocalState

struct ScopeInfo final : c10::DebugInfoBase {
  explicit ScopeInfo(c10::DeviceType type) : type(type) {}
  c10::DeviceType type;
};

constexpr std::string_view kScopeName = "QUARTZ_ACCELERATOR";

// A slot of our own: an enumeration up to torch 2.13, the address of a name from 2.14.
template <class Kind>
Kind scope_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x51);
  } else {
    return Kind(&kScopeName);
  }
}

const ScopeInfo* current_scope() {
  return static_cast<const ScopeInfo*>(c10::ThreadLocalDebugInfo::get(scope_kind<c10::DebugInfoKind>()));
}

// ------------------------------------------------------------------ the slot in libtorch_cpu.so

struct Slot {
  GetAccelerator* address = nullptr;  // where the library keeps the address it calls
  GetAccelerator function = nullptr;  // the library's own definition
  bool read_only = false;             // inside the range made read-only after relocation
  std::string problem;                // why there is none
};

template <class T>
T dynamic_pointer(const dl_phdr_info& module, ElfW(Addr) value) {
  // glibc has added the load address already, other loaders leave it to the reader.
  return reinterpret_cast<T>(value < module.dlpi_addr ? value + module.dlpi_addr : value);
}

// Looks through the relocations of the library's procedure linkage table.
void find_slot(const dl_phdr_info& module, Slot& slot) {
  const ElfW(Dyn)* dynamic = nullptr;
  ElfW(Addr) relro_begin = 0, relro_end = 0;
  for (int i = 0; i < module.dlpi_phnum; i++) {
    const auto& header = module.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(module.dlpi_addr + header.p_vaddr);
    } else if (header.p_type == PT_GNU_RELRO) {
      relro_begin = module.dlpi_addr + header.p_vaddr;
      relro_end = relro_begin + header.p_memsz;
    }
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela)* relocations = nullptr;
  std::size_t count = 0;
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        symbols = dynamic_pointer<const ElfW(Sym)*>(module, dynamic->d_un.d_ptr);
        break;
      case DT_STRTAB:
        strings = dynamic_pointer<const char*>(module, dynamic->d_un.d_ptr);
        break;
      case DT_JMPREL:
        relocations = dynamic_pointer<const ElfW(Rela)*>(module, dynamic->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        break;
      case DT_PLTREL:
        if (dynamic->d_un.d_val != DT_RELA) {
          slot.problem = "its relocations have no addends";
          return;
        }
        break;
      default:
        break;
    }
  }
  if (symbols == nullptr || strings == nullptr || relocations == nullptr) {
    slot.problem = "it has no procedure linkage table";
    return;
  }
  for (std::size_t i = 0; i < count; i++) {
    const auto& symbol = symbols[ELF64_R_SYM(relocations[i].r_info)];
    if (ELF64_R_TYPE(relocations[i].r_info) != R_X86_64_JUMP_SLOT ||
        std::strcmp(strings + symbol.st_name, kSymbol) != 0) {
      continue;
    }
    if (symbol.st_shndx == SHN_UNDEF) {
      slot.problem = std::string("it does not define ") + kSymbol;
      return;
    }
    const auto address = module.dlpi_addr + relocations[i].r_offset;
    slot.address = reinterpret_cast<GetAccelerator*>(address);
    slot.function = reinterpret_cast<GetAccelerator>(module.dlpi_addr + symbol.st_value);
    slot.read_only = address >= relro_begin && address < relro_end;
    return;
  }
  slot.problem = std::string("it does not call ") + kSymbol + " through its procedure linkage table";
}

int visit_module(dl_phdr_info* module, std::size_t, void* data) {
  const std::string_view path(module->dlpi_name == nullptr ? "" : module->dlpi_name);
  if (path.substr(path.rfind('/') + 1) != kLibrary) return 0;
  auto& slot = *static_cast<Slot*>(data);
  slot.problem.clear();
  find_slot(*module, slot);
  return 1;  // stop
}

// ------------------------------------------------------------------ the redirection

std::mutex redirect_mutex;
std::atomic<bool> redirected{false};
Slot redirected_slot;
std::atomic<GetAccelerator> original{nullptr};

std::optional<c10::DeviceType> scoped_or_original(bool checked) {
  if (const auto* scope = current_scope()) return scope->type;
  return original.load(std::memory_order_acquire)(checked);
}

void write_slot(const Slot& slot, GetAccelerator function) {
  const auto page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot.address) & ~(page_size - 1));
  if (slot.read_only) {
    TORCH_CHECK(::mprotect(page, page_size, PROT_READ | PROT_WRITE) == 0, "quartz: the procedure linkage table of ",
                kLibrary, " cannot be made writable: ", std::strerror(errno));
  }
  __atomic_store_n(slot.address, function, __ATOMIC_RELEASE);
  if (slot.read_only) ::mprotect(page, page_size, PROT_READ);
}

bool on_type(const torch::autograd::Node& node, c10::DeviceType type) {
  for (std::uint32_t i = 0; i < node.num_inputs(); i++) {
    if (node.input_metadata(i).device().type() == type) return true;
  }
  return false;
}

}  // namespace

void redirect_accelerator() {
  std::lock_guard<std::mutex> lock(redirect_mutex);
  if (redirected.load(std::memory_order_relaxed)) return;
  Slot slot;
  slot.problem = "it is not loaded as a shared library";
#if defined(__x86_64__) && defined(__linux__)
  ::dl_iterate_phdr(&visit_module, &slot);
#else
  slot.problem = "this is known for Linux on x86-64 only";
#endif
  TORCH_CHECK(slot.address != nullptr,
              "quartz: the accelerator question of the autograd engine cannot be redirected in ", kLibrary, ": ",
              slot.problem);
  // Whoever redirected the slot before us stays in the chain; an entry not yet bound points into the library itself.
  const auto before = __atomic_load_n(slot.address, __ATOMIC_ACQUIRE);
  Dl_info bound{}, own{};
  const bool unbound = ::dladdr(reinterpret_cast<void*>(before), &bound) == 0 ||
                       ::dladdr(reinterpret_cast<void*>(slot.function), &own) == 0 || bound.dli_fbase == own.dli_fbase;
  original.store(unbound ? slot.function : before, std::memory_order_release);
  write_slot(slot, &scoped_or_original);
  redirected_slot = slot;
  redirected.store(true, std::memory_order_release);
}

void restore_accelerator() {
  std::lock_guard<std::mutex> lock(redirect_mutex);
  if (!redirected.load(std::memory_order_relaxed)) return;
  write_slot(redirected_slot, original.load(std::memory_order_relaxed));
  redirected.store(false, std::memory_order_release);
}

bool accelerator_is_redirected() { return redirected.load(std::memory_order_acquire); }

AcceleratorScope::AcceleratorScope(c10::DeviceType type)
    : guard_((redirect_accelerator(), scope_kind<c10::DebugInfoKind>()), std::make_shared<ScopeInfo>(type)) {}

std::optional<c10::DeviceType> scoped_accelerator() {
  const auto* scope = current_scope();
  return scope == nullptr ? std::nullopt : std::optional(scope->type);
}

GraphAccelerators graph_accelerators(const std::vector<const torch::autograd::Node*>& roots, c10::DeviceType native,
                                     bool whole) {
  GraphAccelerators found;
  std::vector<const torch::autograd::Node*> stack(roots.rbegin(), roots.rend());
  std::unordered_set<const torch::autograd::Node*> seen;
  while (!stack.empty()) {
    const auto* node = stack.back();
    stack.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    found.quartz = found.quartz || on_type(*node, kQuartz);
    found.native = found.native || on_type(*node, native);
    if ((found.quartz || found.native) && !whole) break;
    if (found.quartz && found.native) break;
    for (const auto& edge : node->next_edges()) stack.push_back(edge.function.get());
  }
  return found;
}

}  // namespace quartz
