// Streams: worker threads that run what is queued on them, in order and late.
//
// A queue keeps nothing alive that its tasks use, and only those calls wait for a stream that do so on a GPU. They are
// counted by cause.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace lagging {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using Time = std::chrono::time_point<Clock, Seconds>;

constexpr int NUM_DEVICES = 2;
constexpr size_t NUM_ENDS = 1 << 14;        // tasks of a stream whose ends are known
constexpr Seconds MOST_LATE{0.05};          // by which a stream's modelled time is behind, as threads wake up late
constexpr int64_t NUM_POOLED_STREAMS = 32;  // as many as torch makes on a CUDA device; further ones share them

// What a test sets by name.
struct Settings {
  std::atomic<double> delay_seed{-1};       // below 0: no random delays
  std::atomic<double> kernel_s{0};          // least duration of a kernel
  std::atomic<double> flops_per_s{0};       // rate of products of two matrices; 0: as fast as they go
  std::atomic<double> h2d_bytes_per_s{0};   // rates of copies; 0: as fast as they go
  std::atomic<double> d2h_bytes_per_s{0};
  std::atomic<double> comm_bytes_per_s{0};  // of what a rank sends in a collective
  std::atomic<double> capacity_nbytes{8.0 * (1 << 30)};  // of each device
  std::atomic<double> splits_blocks{0};  // 1: free blocks are given out in parts, too
  std::atomic<double> one_queue{0};  // 1: all streams of a device share one queue, in the order of their launches

  std::atomic<double>* find(const std::string& name) {
    if (name == "delay_seed") return &delay_seed;
    if (name == "kernel_s") return &kernel_s;
    if (name == "flops_per_s") return &flops_per_s;
    if (name == "h2d_bytes_per_s") return &h2d_bytes_per_s;
    if (name == "d2h_bytes_per_s") return &d2h_bytes_per_s;
    if (name == "comm_bytes_per_s") return &comm_bytes_per_s;
    if (name == "capacity_nbytes") return &capacity_nbytes;
    if (name == "splits_blocks") return &splits_blocks;
    if (name == "one_queue") return &one_queue;
    return nullptr;
  }
};
inline Settings settings;

class Counts {
 public:
  void add(const std::string& what, int64_t count = 1) {
    std::lock_guard<std::mutex> guard(lock_);
    counts_[what] += count;
  }
  std::map<std::string, int64_t> take() {
    std::lock_guard<std::mutex> guard(lock_);
    return std::exchange(counts_, {});
  }

 private:
  std::mutex lock_;
  std::map<std::string, int64_t> counts_;
};
inline Counts& counts() {
  static auto* found = new Counts();  // never destroyed, like all that worker threads use
  return *found;
}

// The first error of a kernel; the next host wait raises it, as CUDA does.
class DeviceError {
 public:
  void set(const std::string& text) {
    std::lock_guard<std::mutex> guard(lock_);
    if (text_.empty()) text_ = text;
  }
  void check() {
    std::string text;
    {
      std::lock_guard<std::mutex> guard(lock_);
      text = std::exchange(text_, {});
    }
    TORCH_CHECK(text.empty(), "lagging device: a kernel failed: ", text);
  }

 private:
  std::mutex lock_;
  std::string text_;
};
inline DeviceError& device_error() {
  static auto* found = new DeviceError();
  return *found;
}

class Stream {
 public:
  const int device;
  const int64_t id;

  Stream(int device, int64_t id) : device(device), id(id) {
    std::thread([this] { run(); }).detach();
  }

  // Queue `work`, which takes `at_least_s` and touches memory at the end of that. Return its number. Notes are not
  // delayed.
  uint64_t launch(std::function<void()> work, double at_least_s = 0) {
    return put({std::move(work), at_least_s, true});
  }
  uint64_t note(std::function<void()> work) { return put({std::move(work), 0, false}); }
  uint64_t launch_wait(Stream& other, uint64_t number) {
    return note([this, &other, number] {
      other.wait(number);
      free_at_ = std::max(free_at_, other.end_of(number));
    });
  }

  // Run nothing more until it is let go.
  void hold(bool is_held) {
    std::lock_guard<std::mutex> guard(lock_);
    is_held_ = is_held;
    launched_.notify_one();
  }

  uint64_t num_launched() {
    std::lock_guard<std::mutex> guard(lock_);
    return num_launched_;
  }
  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> guard(lock_);
    return num_done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> guard(lock_);
    done_.wait(guard, [&] { return num_done_ >= number; });
  }
  // On this stream's thread: when the tasks so far were to end.
  Time free_at() const { return free_at_; }
  // When the task, which is done, was to end; "long ago" of one of very long ago.
  Time end_of(uint64_t number) {
    std::lock_guard<std::mutex> guard(lock_);
    return number == 0 || num_done_ - number >= NUM_ENDS ? Time{} : ends_[(number - 1) % NUM_ENDS];
  }

 private:
  struct Task {
    std::function<void()> work;
    double at_least_s;
    bool is_delayed;
    Time launched_at = {};
  };

  uint64_t put(Task task) {
    std::lock_guard<std::mutex> guard(lock_);
    task.launched_at = Clock::now();
    tasks_.push_back(std::move(task));
    launched_.notify_one();
    return ++num_launched_;
  }

  void run() {
    at::init_num_threads();  // as many as torch was set to; MKL and OpenMP ask each thread, and sums depend on it
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> guard(lock_);
        launched_.wait(guard, [&] { return !tasks_.empty() && !is_held_; });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      free_at_ = std::max(free_at_, task.launched_at) + Seconds(task.at_least_s);
      if (task.is_delayed) delay();
      if (task.at_least_s > 0) std::this_thread::sleep_until(free_at_);
      try {
        task.work();
      } catch (const std::exception& error) {
        device_error().set(error.what());
      }
      task.work = nullptr;
      if (Clock::now() - free_at_ > MOST_LATE) free_at_ = Clock::now();  // the work itself has waited
      {
        std::lock_guard<std::mutex> guard(lock_);
        ends_[num_done_++ % NUM_ENDS] = free_at_;
        done_.notify_all();
      }
    }
  }

  // Nothing in 7 of 10 tasks, up to 300 us mostly, 1 to 4 ms in 3 of 100.
  void delay() {
    const auto seed = static_cast<int64_t>(settings.delay_seed.load());
    if (seed < 0) return;
    if (seed != seed_) random_.seed(7919 * seed + 101 * device + id), seed_ = seed;
    std::uniform_real_distribution<> draw(0, 1);
    const double kind = draw(random_), size = draw(random_);
    if (kind >= 0.97) std::this_thread::sleep_for(Seconds(1e-3 + 3e-3 * size));
    else if (kind >= 0.7) std::this_thread::sleep_for(Seconds(3e-4 * size));
  }

  std::mutex lock_;
  std::condition_variable launched_, done_;
  std::deque<Task> tasks_;
  uint64_t num_launched_ = 0, num_done_ = 0;
  Time free_at_ = {};  // one that wakes up late does not delay the next
  std::vector<Time> ends_ = std::vector<Time>(NUM_ENDS);
  bool is_held_ = false;
  int64_t seed_ = -1;
  std::mt19937_64 random_;
};

class Streams {
 public:
  Stream& at(int device, int64_t id) {
    std::lock_guard<std::mutex> guard(lock_);
    if (settings.one_queue.load() > 0) id = 0;
    auto& found = streams_[{device, id}];
    if (!found) found = std::make_unique<Stream>(device, id);
    return *found;
  }
  int64_t next_id() { return 1 + num_made_++ % NUM_POOLED_STREAMS; }  // 0: the default stream
  void wait_all(int device) {
    std::vector<Stream*> all;
    {
      std::lock_guard<std::mutex> guard(lock_);
      for (auto& [key, stream] : streams_)
        if (key.first == device) all.push_back(stream.get());
    }
    for (auto* stream : all) stream->wait(stream->num_launched());
  }

 private:
  std::mutex lock_;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams_;
  std::atomic<int64_t> num_made_{0};
};
inline Streams& streams() {
  static auto* found = new Streams();
  return *found;
}

// Of the calling thread, as in CUDA: its device, and its stream of each.
inline thread_local int current_device = 0;
inline thread_local int64_t current_ids[NUM_DEVICES] = {};

inline Stream& current_stream(int device) { return streams().at(device, current_ids[device]); }

class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(std::exchange(current_device, device)) {}
  ~DeviceScope() { current_device = before_; }

 private:
  int before_;
};

// The host's waits, by cause.
inline void wait_for(Stream& stream, uint64_t number, const std::string& cause) {
  counts().add("host_wait." + cause);
  stream.wait(number);
  device_error().check();
}
inline void wait_for_device(int device, const std::string& cause) {
  counts().add("host_wait." + cause);
  streams().wait_all(device);
  device_error().check();
}

}  // namespace lagging
