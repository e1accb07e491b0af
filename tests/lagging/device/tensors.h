// Tensors of the device without kernels: their memory, copies and views.
#pragma once

#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

namespace lagging {

using at::Tensor;

inline bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// [same, CPU] over the bytes of a device tensor, for a stream's thread.
inline Tensor shadow(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const size_t needed = (last + 1) * tensor.itemsize();
  TORCH_CHECK(tensor.storage().nbytes() >= needed,
              "CUDA error: an illegal memory access was encountered (a kernel uses ", needed,
              " bytes of a storage that has ", tensor.storage().nbytes(), ")");
  auto* start = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  auto found = at::from_blob(space().readable(start), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) found.unsafeGetTensorImpl()->set_wrapped_number(true);
  return found;
}

// -- memory -----------------------------------------------------------------------------------------------------------

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  DeviceScope scope(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  DeviceScope scope(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// New memory from the current stream; what was there is copied in its order.
inline void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const int device = storage->device().index();
  DeviceScope scope(device);
  auto memory = allocator().allocate(nbytes);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    char *to = space().readable(memory.get()), *from = space().readable(storage->data());
    current_stream(device).launch([=] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes);
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

inline Tensor& set_(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_to_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_(self, std::move(source), 0, {numel}, {1});
}

inline void record_stream(Tensor& self, at::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// -- copies -----------------------------------------------------------------------------------------------------------

inline void copy_on_device(const Tensor& target, const Tensor& source) {
  counts().add("copy.d2d");
  auto &stream = current_stream(source.device().index()), &other = current_stream(target.device().index());
  if (&stream != &other) {  // between devices: after both, as CUDA does
    stream.note([&other, number = other.num_launched()] { other.wait(number); });
  }
  auto copy = [to = shadow(target), from = shadow(source)] { to.copy_(from); };
  const auto number = stream.launch(copy, settings.kernel_s.load());
  if (&stream != &other) other.note([&stream, number] { stream.wait(number); });
}

// One cudaMemcpyAsync; else the bytes go by a temporary tensor or by pageable memory.
inline bool is_one_copy(const Tensor& target, const Tensor& source) {
  return target.scalar_type() == source.scalar_type() && target.is_contiguous() && source.is_contiguous();
}

// One that uses the `nbytes` of host memory at `start` late.
inline void launch_copy(Stream& stream, Tensor to, Tensor from, const void* start, size_t nbytes, double at_least_s) {
  pinned().use(start, nbytes);
  auto copy = [=] {
    to.copy_(from);
    pinned().unuse(start, nbytes);
  };
  stream.launch(copy, at_least_s);
}

inline void copy_to_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  const int device = target.device().index();
  auto& stream = current_stream(device);
  const size_t nbytes = source.nbytes();
  const double rate = settings.h2d_bytes_per_s.load(), at_least_s = rate > 0 ? nbytes / rate : 0;
  const auto* start = source.const_data_ptr();
  if (non_blocking && is_one_copy(target, source) && pinned().contains(start, nbytes)) {
    counts().add("copy.h2d.async");
    counts().add("copy.h2d.async_bytes", nbytes);
    auto from = at::from_blob(const_cast<void*>(start), source.sizes(), source.strides(), source.options());
    launch_copy(stream, shadow(target), from, start, nbytes, at_least_s);
    return;
  }
  counts().add(non_blocking ? "copy.h2d.pageable" : "copy.h2d.blocking");
  auto copy = [to = shadow(target), from = source.clone()] { to.copy_(from); };
  const auto number = stream.launch(copy, at_least_s);
  if (!non_blocking) wait_for(stream, number, "copy_to_device");
}

inline void copy_to_host(const Tensor& target, const Tensor& source, bool non_blocking) {
  auto& stream = current_stream(source.device().index());
  const size_t nbytes = target.nbytes();
  const double rate = settings.d2h_bytes_per_s.load(), at_least_s = rate > 0 ? nbytes / rate : 0;
  auto* start = target.data_ptr();
  const auto options = target.options().requires_grad(false);
  auto to = at::from_blob(start, target.sizes(), target.strides(), options);
  if (non_blocking && is_one_copy(target, source) && pinned().contains(start, nbytes)) {
    counts().add("copy.d2h.async");
    counts().add("copy.d2h.async_bytes", nbytes);
    launch_copy(stream, to, shadow(source), start, nbytes, at_least_s);
    return;
  }
  counts().add("copy.d2h.blocking");
  const auto number = stream.launch([to, from = shadow(source)] { to.copy_(from); }, at_least_s);
  wait_for(stream, number, "copy_to_host");
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const auto expanded = source.expand_as(self);
  if (self.numel() == 0) return self;
  const int device = self.is_cuda() ? self.device().index() : source.device().index();
  DeviceScope scope(device);
  at::AutoDispatchBelowAutograd below;
  if (self.is_cuda() && source.is_cuda()) copy_on_device(self, expanded);
  else if (self.is_cuda()) copy_to_device(self, expanded, non_blocking);
  else copy_to_host(self, expanded, non_blocking);
  return self;
}

inline at::Scalar local_scalar_dense(const Tensor& self) {
  auto& stream = current_stream(self.device().index());
  const auto value = shadow(self);
  wait_for(stream, stream.num_launched(), "item");
  return at::_local_scalar_dense(value);
}

// -- views ------------------------------------------------------------------------------------------------------------

inline Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
inline Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
inline Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
inline Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }

}  // namespace lagging
