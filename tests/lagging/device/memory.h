// Memory of the devices and of the host.
//
// Device addresses are PROT_NONE: the host crashes on touching them; streams use a second mapping of the same pages.
// Freed blocks are overwritten with 0xFF (NaN in every floating-point format) in the order of the stream that they were
// allocated on, and given out again at once to that stream, as CUDA's caching allocator does: whole, or, with the setting
// `splits_blocks`, the best fitting one in parts, which join again as they are freed. A private pool has blocks of its own.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

namespace lagging {

constexpr size_t SPACE_NBYTES = size_t(32) << 30;  // addresses of each device; pages are taken as they are written
constexpr size_t BLOCK_NBYTES = 512;

class Space {
 public:
  Space() {
    const int file = memfd_create("lagging_device", 0);
    const size_t nbytes = NUM_DEVICES * SPACE_NBYTES;
    TORCH_CHECK(file >= 0 && ftruncate(file, nbytes) == 0, "lagging device: no memory file could be made");
    auto map = [&](int protection) { return mmap(nullptr, nbytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0); };
    void *device = map(PROT_NONE), *host = map(PROT_READ | PROT_WRITE);
    TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "lagging device: ", 2 * nbytes,
                " bytes of address space are needed; raise ulimit -v");
    device_ = static_cast<char*>(device), host_ = static_cast<char*>(host);
  }
  char* start(int device) const { return device_ + device * SPACE_NBYTES; }
  char* readable(const void* address) const { return host_ + (static_cast<const char*>(address) - device_); }
  int device_of(const void* address) const {  // -1: host memory
    const auto offset = static_cast<const char*>(address) - device_;
    return offset >= 0 && offset < ptrdiff_t(NUM_DEVICES * SPACE_NBYTES) ? int(offset / SPACE_NBYTES) : -1;
  }

 private:
  char *device_, *host_;
};
inline Space& space() {
  static auto* found = new Space();
  return *found;
}

inline thread_local int64_t current_pool = 0;  // 0: the common one

struct Block {
  char* address;
  size_t nbytes;
  int device;
  int64_t stream;
  int64_t pool;
  std::set<int64_t> recorded;  // further streams that use it (`record_stream`)
};

struct Figure {
  size_t now = 0, peak = 0;
  void add(size_t nbytes) { peak = std::max(peak, now += nbytes); }
};

class Pool {
 public:
  Figure allocated, active, reserved;

  explicit Pool(int device) : device_(device) {}

  Block* take(size_t wanted_nbytes) {
    const size_t nbytes = (wanted_nbytes + BLOCK_NBYTES - 1) / BLOCK_NBYTES * BLOCK_NBYTES;
    std::unique_lock<std::mutex> guard(lock);
    collect();
    auto* block = new Block{nullptr, nbytes, device_, current_ids[device_], current_pool, {}};
    if (!reuse(*block)) {
      if (!fits(nbytes) && block->pool == 0) {  // in a private pool torch does not try again
        guard.unlock();
        release();
        guard.lock();
      }
      if (!fits(nbytes) && !reuse_last(*block)) {
        delete block;
        throw c10::OutOfMemoryError(
            {__func__, __FILE__, __LINE__},
            c10::str("CUDA out of memory (lagging device ", device_, "): tried to allocate ", nbytes, " bytes, ",
                     reserved.now, " are reserved of ", size_t(settings.capacity_nbytes.load())));
      }
      if (!block->address) {
        block->address = new_address(nbytes);
        segments_[block->address] = nbytes;
        reserved.add(nbytes);
        if (block->pool) private_reserved.add(nbytes);
        counts().add("device_malloc");
      }
    }
    allocated.add(nbytes);
    active.add(nbytes);
    return block;
  }

  void free(Block* block) {
    std::lock_guard<std::mutex> guard(lock);
    allocated.now -= block->nbytes;
    std::vector<std::pair<int64_t, uint64_t>> until;
    for (auto id : block->recorded) until.push_back({id, streams().at(device_, id).num_launched()});
    if (until.empty()) recycle(block);
    else waiting_.push_back({block, until});
  }

  void record(Block* block, int64_t stream) {
    std::lock_guard<std::mutex> guard(lock);
    if (stream != block->stream) block->recorded.insert(stream);
  }

  // torch.cuda.empty_cache(): what is free of the common pool, and of pools that are dropped.
  void release() {
    wait_for_device(device_, "empty_cache");
    std::lock_guard<std::mutex> guard(lock);
    collect();
    for (auto& [key, own] : free_) {
      if (key.second != 0 && !dropped_.count(key.second)) continue;
      for (auto next = own.blocks.begin(); next != own.blocks.end();) {
        auto block = next++;
        auto segment = segments_.find(block->first);
        if (segment == segments_.end() || segment->second != block->second) continue;  // a part of it is in use
        reserved.now -= block->second;
        if (key.second) private_reserved.now -= block->second;
        released_[block->second].push_back(block->first);
        segments_.erase(segment);
        own.remove(block);
      }
    }
  }

  void drop(int64_t pool) {
    std::lock_guard<std::mutex> guard(lock);
    dropped_.insert(pool);
    last_.erase(pool);
  }

  // What is free of `pool` serves others before they are out of memory (`use_on_oom`).
  void serve_others(int64_t pool) {
    std::lock_guard<std::mutex> guard(lock);
    last_.insert(pool);
  }
  Figure private_reserved;  // of `reserved`, in pools that are not the common one

  std::mutex lock;

 private:
  bool fits(size_t nbytes) const { return double(reserved.now + nbytes) <= settings.capacity_nbytes.load(); }

  char* new_address(size_t nbytes) {
    auto& known = released_[nbytes];
    char* address;
    if (!known.empty()) {
      address = known.back();
      known.pop_back();
    } else {
      TORCH_CHECK(used_nbytes_ + nbytes <= SPACE_NBYTES, "lagging device ", device_, " has no addresses left");
      address = space().start(device_) + used_nbytes_;
      used_nbytes_ += nbytes;
    }
    memset(space().readable(address), 0xFF, nbytes);
    return address;
  }

  // The host sees that other streams are done with blocks that were recorded on them.
  void collect() {
    for (size_t at = 0; at < waiting_.size();) {
      auto& [block, until] = waiting_[at];
      bool done = true;
      for (auto& [id, number] : until) done = done && streams().at(device_, id).is_done(number);
      if (!done) {
        ++at;
        continue;
      }
      recycle(block);
      waiting_.erase(waiting_.begin() + at);
    }
  }

  void recycle(Block* block) {
    active.now -= block->nbytes;
    char* bytes = space().readable(block->address);
    streams().at(device_, block->stream).note([bytes, nbytes = block->nbytes] { memset(bytes, 0xFF, nbytes); });
    join(free_[{block->stream, block->pool}], block->address, block->nbytes);
    delete block;
  }

  using Blocks = std::map<char*, size_t>;  // address -> bytes

  // What is free of one stream and pool; of one size the last that was freed comes first.
  struct Free {
    Blocks blocks;
    std::map<size_t, std::vector<char*>> by_size;

    void add(char* address, size_t nbytes) {
      blocks[address] = nbytes;
      by_size[nbytes].push_back(address);
    }
    void remove(Blocks::iterator block) {
      auto& alike = by_size[block->second];
      alike.erase(std::find(alike.begin(), alike.end(), block->first));
      if (alike.empty()) by_size.erase(block->second);
      blocks.erase(block);
    }
  };

  // Give `block` the address of a free one of its stream and pool, if any is as large, or large enough to be split.
  bool reuse(Block& block) {
    auto& own = free_[{block.stream, block.pool}];
    auto fitting = settings.splits_blocks > 0 ? own.by_size.lower_bound(block.nbytes) : own.by_size.find(block.nbytes);
    if (fitting == own.by_size.end()) return false;
    auto best = own.blocks.find(fitting->second.back());
    block.address = best->first;
    const size_t rest = best->second - block.nbytes;
    own.remove(best);
    if (rest) own.add(block.address + block.nbytes, rest);
    return true;
  }

  // Give `block`, of the common pool, the address of a free one of a pool that serves others.
  bool reuse_last(Block& block) {
    for (auto pool : block.pool ? std::set<int64_t>() : last_) {
      block.pool = pool;
      if (reuse(block)) return true;
      block.pool = 0;
    }
    return false;
  }

  // Add a free block, joined with its neighbours of the same segment.
  void join(Free& own, char* address, size_t nbytes) {
    auto next = own.blocks.find(address + nbytes);
    if (next != own.blocks.end() && !segments_.count(next->first)) {
      nbytes += next->second;
      own.remove(next);
    }
    auto before = own.blocks.lower_bound(address);
    if (!segments_.count(address) && before != own.blocks.begin()) {
      --before;
      if (before->first + before->second == address) {
        address = before->first;
        nbytes += before->second;
        own.remove(before);
      }
    }
    own.add(address, nbytes);
  }

  const int device_;
  size_t used_nbytes_ = 0;
  std::map<std::pair<int64_t, int64_t>, Free> free_;  // by (stream, pool)
  Blocks segments_;                                   // what is reserved
  std::set<int64_t> dropped_, last_;
  std::map<size_t, std::vector<char*>> released_;  // by size; these are not reserved any more
  std::vector<std::pair<Block*, std::vector<std::pair<int64_t, uint64_t>>>> waiting_;
};
inline Pool& pool(int device) {
  static auto* pools = new std::vector<std::unique_ptr<Pool>>();
  static std::once_flag once;
  std::call_once(once, [] {
    for (int index = 0; index < NUM_DEVICES; ++index) pools->push_back(std::make_unique<Pool>(index));
  });
  return *(*pools)[device];
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  pool(block->device).free(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device));
    if (nbytes == 0) return {nullptr, device};
    auto* block = pool(current_device).take(nbytes);
    return {block->address, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    char *to = space().readable(target), *from = space().readable(source);
    current_stream(current_device).launch([=] { memcpy(to, from, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < NUM_DEVICES; ++device) pool(device).release();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    counts().add("record_stream");
    if (auto* block = static_cast<Block*>(memory.get_context())) pool(block->device).record(block, stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& from = pool(device);
    std::lock_guard<std::mutex> guard(from.lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, const Figure& figure) {
      stat[0].current = int64_t(figure.now);
      stat[0].peak = int64_t(figure.peak);
    };
    set(stats.allocated_bytes, from.allocated);
    set(stats.active_bytes, from.active);
    set(stats.reserved_bytes, from.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& of = pool(device);
    std::lock_guard<std::mutex> guard(of.lock);
    for (auto* figure : {&of.allocated, &of.active, &of.reserved, &of.private_reserved}) figure->peak = figure->now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(pool(device).lock);
    const auto total = size_t(settings.capacity_nbytes.load());
    return {total - std::min(total, pool(device).reserved.now), total};
  }
};
inline Allocator& allocator() {
  static auto* found = new Allocator();
  return *found;
}

// Host memory that copies may use in the background, and the parts that copies under way use.
class PinnedMemory {
 public:
  bool add(uintptr_t start, size_t nbytes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto next = ranges_.lower_bound(start);
    if (next != ranges_.end() && next->first < start + nbytes) return false;
    if (next != ranges_.begin() && std::prev(next)->second > start) return false;
    ranges_[start] = start + nbytes;
    return true;
  }
  bool remove(uintptr_t start) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = ranges_.find(start);
    if (found == ranges_.end()) return false;
    if (is_in_use(found->first, found->second)) counts().add("unpinned_under_a_copy");
    ranges_.erase(found);
    return true;
  }
  size_t nbytes() {
    std::lock_guard<std::mutex> guard(lock_);
    size_t sum = 0;
    for (auto& [start, stop] : ranges_) sum += stop - start;
    return sum;
  }
  bool contains(const void* address, size_t nbytes = 1) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto start = reinterpret_cast<uintptr_t>(address);
    auto next = ranges_.upper_bound(start);
    return next != ranges_.begin() && start + nbytes <= std::prev(next)->second;
  }
  void use(const void* address, size_t nbytes) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto start = reinterpret_cast<uintptr_t>(address);
    in_use_.insert({start, start + nbytes});
  }
  void unuse(const void* address, size_t nbytes) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto start = reinterpret_cast<uintptr_t>(address);
    in_use_.erase(in_use_.find({start, start + nbytes}));
    unused_.notify_all();
  }
  void wait_unused(const void* address, size_t nbytes) {
    std::unique_lock<std::mutex> guard(lock_);
    const auto start = reinterpret_cast<uintptr_t>(address);
    unused_.wait(guard, [&] { return !is_in_use(start, start + nbytes); });
  }

 private:
  bool is_in_use(uintptr_t start, uintptr_t stop) const {
    for (auto& [first, last] : in_use_)
      if (first < stop && start < last) return true;
    return false;
  }
  std::mutex lock_;
  std::condition_variable unused_;
  std::map<uintptr_t, uintptr_t> ranges_;
  std::multiset<std::pair<uintptr_t, uintptr_t>> in_use_;
};
inline PinnedMemory& pinned() {
  static auto* found = new PinnedMemory();
  return *found;
}

// torch.empty(..., pin_memory=True). As torch's own, it gives memory back once copies are done with it.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto* memory = new std::pair<void*, size_t>(nullptr, nbytes);
    TORCH_CHECK(posix_memalign(&memory->first, 4096, nbytes) == 0, "lagging device: no host memory");
    pinned().add(reinterpret_cast<uintptr_t>(memory->first), nbytes);
    auto give_back = [](void* context) {
      auto* memory = static_cast<std::pair<void*, size_t>*>(context);
      pinned().wait_unused(memory->first, memory->second);
      pinned().remove(reinterpret_cast<uintptr_t>(memory->first));
      ::free(memory->first);
      delete memory;
    };
    return {memory->first, memory, give_back, c10::Device(c10::kCPU)};
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override { memcpy(target, source, nbytes); }
};
inline PinnedAllocator& pinned_allocator() {
  static auto* found = new PinnedAllocator();
  return *found;
}

}  // namespace lagging
