// What torch asks of a device besides kernels: guard, streams, events, random numbers.
#pragma once

#include "memory.h"

#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace lagging {

struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;
  std::shared_ptr<Time> time;  // with enable_timing
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "CUDA error: invalid device ordinal (lagging device)");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream getStream(c10::Device device) const override { return make(device, current_ids[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return make(device, streams().next_id()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return make(stream.device(), std::exchange(current_ids[stream.device_index()], stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return of(stream).is_done(of(stream).num_launched()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(of(stream), of(stream).num_launched(), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device < 0 ? current_device : device, "device");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event();
    auto& mark = *static_cast<Event*>(*event);
    mark.stream = &of(stream);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {  // with enable_timing
      mark.time = std::make_shared<Time>();
      mark.number = mark.stream->note([time = mark.time, stream = mark.stream] { *time = stream->free_at(); });
    } else {
      mark.number = mark.stream->num_launched();
    }
    counts().add("event_record");
  }
  void block(void* event, const c10::Stream& stream) const override {
    counts().add("event_wait");
    if (event == nullptr) return;
    auto [from, number, time] = *static_cast<Event*>(event);
    if (from != &of(stream)) of(stream).launch_wait(*from, number);
  }
  bool queryEvent(void* event) const override {
    auto* mark = static_cast<Event*>(event);
    const bool is_done = mark == nullptr || mark->stream->is_done(mark->number);
    if (is_done) device_error().check();
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    auto* mark = static_cast<Event*>(event);
    if (mark != nullptr) wait_for(*mark->stream, mark->number, "event");
  }
  double elapsedTime(void* start, void* stop, c10::DeviceIndex) const override {
    auto *first = static_cast<Event*>(start), *last = static_cast<Event*>(stop);
    TORCH_CHECK(first && last && first->time && last->time, "both events are recorded, and made with enable_timing");
    TORCH_CHECK(queryEvent(start) && queryEvent(stop), "both events are completed");
    return std::chrono::duration<double, std::milli>(*last->time - *first->time).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream make(c10::Device device, int64_t id) {
    const c10::Device full(c10::kCUDA, static_cast<c10::DeviceIndex>(index(device)));
    return c10::Stream(c10::Stream::UNSAFE, full, id);
  }
  static Stream& of(const c10::Stream& stream) { return streams().at(stream.device_index(), stream.id()); }
};

// Counts its draws, so that a kernel gets its numbers by the time of its launch, however late it runs.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl({c10::kCUDA, static_cast<c10::DeviceIndex>(device)},
                           c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return c10::kCUDA; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "the state is 16 bytes on the CPU");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  uint64_t draw() {
    std::lock_guard<std::mutex> guard(mutex_);
    return seed_ * 6364136223846793005u + 1442695040888963407u * ++offset_;
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

// The first generator that is made for a device is the device's own: Python makes these as it puts the device in place.
inline at::Generator& default_generator(int device) {
  static auto* found = new std::vector<at::Generator>(NUM_DEVICES);
  return (*found)[device];
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(lagging::current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({c10::kCUDA, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : Guard().exchangeDevice({c10::kCUDA, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  c10::Device getDeviceFromPtr(void* address) const override {
    const int device = space().device_of(address);
    TORCH_CHECK(device >= 0, "no address of a lagging device");
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)};
  }
  bool isPinnedPtr(const void* address) const override { return pinned().contains(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? lagging::current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    const int index = device < 0 ? lagging::current_device : device;
    auto made = at::make_generator<GeneratorImpl>(index);
    if (!default_generator(index).defined()) default_generator(index) = made;
    return made;
  }
};

}  // namespace lagging
