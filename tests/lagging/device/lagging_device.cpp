// A device that lags, under torch's CUDA key in a CPU build: the project's CUDA path runs on it as it is.
//
// It is loaded into a CPU build of torch, whose CUDA key has no kernels. See streams.h, memory.h, runtime.h,
// tensors.h and kernels.h, which follow each other, and collectives.h.
#include "collectives.h"
#include "kernels.h"

#include <ATen/Context.h>

namespace lagging {

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_late>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", lagging::empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_);
  library.impl("set_.source_Tensor", set_to_tensor);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("record_stream", record_stream);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("view_as_real", view_as_real);
  library.impl("view_as_complex", view_as_complex);
  library.impl("native_dropout", native_dropout);
  // else torch would compose it of others
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&call_late>());
  // one launch for many tensors, as on a GPU; torch would make one for each
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0 && name.overload_name.find("out") == std::string::npos)
      library.impl((name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&call_late>());
}

TORCH_LIBRARY(lagging, library) { library.def("add_backend", add_backend); }

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// By now torch has made hooks that refuse everything, and keeps them. They have no members, so ours take their place.
static const bool is_registered = [] {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  c10::SetAllocator(c10::kCUDA, &allocator());
  at::globalContext().lazyInitDevice(c10::kCUDA);  // before that no host memory counts as pinned
  return true;
}();

}  // namespace lagging

// What Python calls, by ctypes.
extern "C" {

int lagging_set(const char* name, double value) {
  auto* found = lagging::settings.find(name);
  if (found != nullptr) found->store(value);
  return found != nullptr;
}

void lagging_hold(int device, int64_t stream, int is_held) { lagging::streams().at(device, stream).hold(is_held); }

// Writes "name count\n" for each, and starts again from nothing. Returns 0 where `size` is too small.
int lagging_counts(char* text, size_t size) {
  std::string lines;
  for (auto& [name, count] : lagging::counts().take()) lines += name + " " + std::to_string(count) + "\n";
  if (lines.size() >= size) return 0;
  memcpy(text, lines.c_str(), lines.size() + 1);
  return 1;
}

int lagging_pin(uintptr_t address, size_t nbytes) { return lagging::pinned().add(address, nbytes); }

int lagging_unpin(uintptr_t address) { return lagging::pinned().remove(address); }

// The pool that the calling thread allocates from; 0: the common one.
void lagging_use_pool(int64_t pool) { lagging::current_pool = pool; }

void lagging_serve_others(int device, int64_t pool) { lagging::pool(device).serve_others(pool); }

void lagging_drop_pool(int device, int64_t pool) { lagging::pool(device).drop(pool); }

// Bytes that are reserved by private pools, at most since the peaks were reset.
size_t lagging_private_nbytes(int device) {
  std::lock_guard<std::mutex> guard(lagging::pool(device).lock);
  return lagging::pool(device).private_reserved.peak;
}

size_t lagging_pinned_nbytes() { return lagging::pinned().nbytes(); }

// By a storage's `_cdata`. Returns 0 where memory ran out.
int lagging_resize_storage(void* storage, size_t nbytes) {
  try {
    lagging::resize_storage(static_cast<c10::StorageImpl*>(storage), nbytes);
    return 1;
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
}
}
