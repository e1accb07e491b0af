// A process group of the device, ordered as NCCL's is: a call is queued on a stream of the group, behind what the
// caller's stream holds, and returns at once; waiting for it makes the caller's stream wait, and not the host.
//
// Ranks meet in the group's store. Each posts what the others need under the number of its call, and reads what they
// posted. Where calls differ, ranks wait until the group times out or is aborted, as NCCL's kernels do. Unlike NCCL's,
// a group that timed out does not end the process: the error is raised by the call's `wait`, and by the next host wait.
#pragma once

#include "tensors.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <numeric>
#include <sstream>

namespace lagging {

using Bytes = std::vector<uint8_t>;
using Tensors = std::vector<Tensor>;
using Milliseconds = std::chrono::milliseconds;

constexpr uint64_t NUM_KEPT_POSTS = 32;  // of each rank in the store: more than are posted before the first is read
constexpr auto POLL = Milliseconds(50);

// What ranks do that does not meet; never leaves a stream's thread.
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline Bytes bytes_of(const Tensor& memory) {
  const auto* start = static_cast<const uint8_t*>(memory.const_data_ptr());
  return {start, start + memory.nbytes()};
}
inline void put_bytes(const Tensor& memory, const Bytes& bytes) {
  if (bytes.size() != memory.nbytes())
    throw Mismatch(c10::str("another rank has sent ", bytes.size(), " bytes, not ", memory.nbytes()));
  if (!bytes.empty()) memcpy(memory.data_ptr(), bytes.data(), bytes.size());
}

// What the members of a group, or two of them, call in one order.
struct Channel {
  std::string name;
  std::vector<int> members;
  int64_t stream_id = -1;
  uint64_t num_calls = 0;
  Stream* last = nullptr;  // of the last call, and its number there
  uint64_t last_number = 0;
};

// One collective or message. `what`: the same on every member. `send`: a part for each rank of the group, or one for
// all, or none. `receive`: gets every member's part by rank. Both run on a stream's thread.
struct Exchange {
  Channel* channel;
  std::string what;
  std::function<std::vector<Bytes>()> send;
  std::function<void(std::vector<Bytes>&)> receive;
  uint64_t number = 0;
  std::vector<Bytes> sent = {};
};

// What the tasks of a group share with it, and outlive it with.
class Meeting {
 public:
  Meeting(c10::intrusive_ptr<c10d::Store> store, int rank, int size) : rank(rank), size(size), store_(store->clone()) {}
  const int rank, size;

  void abort() { is_aborted_ = true; }
  std::string error() {
    std::lock_guard<std::mutex> guard(lock_);
    return error_;
  }

  // Posts first, as calls of one batch may wait for each other. Returns an error, or "".
  std::string run(std::vector<Exchange>& exchanges, int device, Clock::time_point deadline, Milliseconds timeout) {
    auto text = error();
    if (text.empty()) {
      try {
        for (auto& exchange : exchanges) post(exchange, device);
        for (auto& exchange : exchanges) collect(exchange, device, deadline, timeout);
        return "";
      } catch (const std::exception& error) {
        text = error.what();
      }
    }
    std::lock_guard<std::mutex> guard(lock_);
    if (error_.empty()) error_ = text;
    if (!is_aborted_) device_error().set(text);
    return text;
  }

 private:
  std::string key(const Exchange& exchange, int rank, uint64_t number) const {
    return c10::str(exchange.channel->name, "/", number, "/", rank);
  }

  void post(Exchange& exchange, int device) {
    exchange.sent = exchange.send();
    std::ostringstream head;
    head << exchange.what << '\n' << device;
    for (auto& part : exchange.sent) head << ' ' << part.size();
    head << '\n';
    const auto text = head.str();
    Bytes value(text.begin(), text.end());
    for (auto& part : exchange.sent) value.insert(value.end(), part.begin(), part.end());
    store_->set(key(exchange, rank, exchange.number), value);
  }

  void collect(Exchange& exchange, int device, Clock::time_point deadline, Milliseconds timeout) {
    auto check = [&](const std::string& why) {
      const auto call = c10::str("call ", exchange.number, " of ", exchange.channel->name, ", ", exchange.what);
      if (is_aborted_) throw std::runtime_error(c10::str("the group was aborted on rank ", rank, " in ", call, why));
      if (Clock::now() > deadline)
        throw std::runtime_error(c10::str("Watchdog caught collective operation timeout: rank ", rank, ", ", call,
                                          ", ran for ", timeout.count(), " milliseconds", why));
    };
    std::vector<Bytes> found(size);
    try {
      for (int other : exchange.channel->members) {
        if (other == rank) {
          found[other] = part_of(exchange.sent);
          continue;
        }
        const auto posted = key(exchange, other, exchange.number);
        for (;;) {
          check(c10::str("; rank ", other, " has not come"));
          try {
            store_->wait({posted}, POLL);
            break;
          } catch (const c10::DistStoreError&) {  // not yet
          }
        }
        found[other] = parse(store_->get(posted), exchange.what, device, other);
      }
      exchange.receive(found);
    } catch (const Mismatch& error) {
      for (;; std::this_thread::sleep_for(Milliseconds(5))) check(c10::str("; ", error.what()));
    }
    exchange.sent.clear();
    if (exchange.number >= NUM_KEPT_POSTS) store_->deleteKey(key(exchange, rank, exchange.number - NUM_KEPT_POSTS));
  }

  Bytes part_of(const std::vector<Bytes>& parts) const {
    return parts.empty() ? Bytes() : parts.size() == 1 ? parts[0] : parts[rank];
  }

  Bytes parse(const Bytes& value, const std::string& what, int device, int other) const {
    const auto first = std::find(value.begin(), value.end(), '\n'), second = std::find(first + 1, value.end(), '\n');
    const std::string found(value.begin(), first);
    if (found != what) throw Mismatch(c10::str("rank ", other, " calls ", found));
    std::istringstream head(std::string(first + 1, second));
    int of = -1;
    head >> of;
    TORCH_CHECK(of != device, "Duplicate GPU detected : rank ", rank, " and rank ", other, " both on CUDA device ", of,
                " (lagging device); rank r was expected to use device LOCAL_RANK");
    std::vector<size_t> sizes;
    for (size_t nbytes; head >> nbytes;) sizes.push_back(nbytes);
    if (sizes.empty()) return {};
    const size_t mine = sizes.size() == 1 ? 0 : rank;
    auto start = second + 1 + std::accumulate(sizes.begin(), sizes.begin() + mine, ptrdiff_t(0));
    return {start, start + sizes[mine]};
  }

  const c10::intrusive_ptr<c10d::Store> store_;  // a connection of its own: others do not wait for this one's waits
  std::atomic<bool> is_aborted_{false};
  std::mutex lock_;
  std::string error_;
};

class LateWork final : public c10d::Work {
 public:
  LateWork(c10d::OpType type, int rank, int device, Stream* stream, std::shared_ptr<std::string> error, uint64_t number,
           Tensors outputs, Tensors held)
      : Work(rank, type), device_(device), stream_(stream), number_(number), error_(std::move(error)),
        outputs_(std::move(outputs)), held_(std::move(held)) {}

  bool isCompleted() override { return stream_->is_done(number_); }
  bool isSuccess() const override { return stream_->is_done(number_) && error_->empty(); }
  std::exception_ptr exception() const override {
    return stream_->is_done(number_) && !error_->empty() ? std::make_exception_ptr(failure()) : nullptr;
  }
  std::vector<Tensor> result() override { return outputs_; }
  void blockCurrentStream() override { synchronize(); }
  void synchronize() override {
    auto& current = current_stream(device_);
    if (&current != stream_) current.note([stream = stream_, number = number_] { stream->wait(number); });
    held_.clear();
  }
  // The caller's stream waits. The host does for a barrier, and for a call with a timeout.
  bool wait(Milliseconds timeout) override {
    const bool blocks = opType_ == c10d::OpType::BARRIER || timeout != ::kNoTimeout;
    if (blocks) {
      counts().add("host_wait.collective");
      const auto deadline = Clock::now() + timeout;
      while (!isCompleted()) {
        TORCH_CHECK_WITH(DistBackendError, timeout == ::kNoTimeout || Clock::now() < deadline, "a collective has run for ",
                         timeout.count(), " milliseconds (lagging device)");
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    if (isCompleted() && !error_->empty()) throw failure();
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{device});
    const auto before = std::exchange(current_ids[device_], stream_->id);  // its events are of the group's stream
    future->markCompleted(c10::IValue(outputs_));
    current_ids[device_] = before;
    return future;
  }

 private:
  c10::DistBackendError failure() const { return {{__func__, __FILE__, __LINE__}, *error_}; }
  const int device_;
  Stream* const stream_;
  const uint64_t number_;
  const std::shared_ptr<std::string> error_;  // written before the task is done
  const Tensors outputs_;
  Tensors held_;  // the queue keeps no memory alive: the caller keeps this object, or the tensors, until it has waited
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class LateGroup final : public c10d::Backend {
 public:
  LateGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), timeout_(timeout), meeting_(std::make_shared<Meeting>(store, rank, size)) {
    all_.name = "all", all_.stream_id = ids().take();
    for (int other = 0; other < size; ++other) all_.members.push_back(other);
  }
  ~LateGroup() override {
    std::set<int64_t> used;
    for (auto* channel : channels()) used.insert(channel->stream_id);
    for (auto id : used) ids().put(id);
  }

  const std::string getBackendName() const override { return "lagging"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return all_.num_calls; }
  c10d::ErrorType getError() override {
    return meeting_->error().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }
  void abort() override { meeting_->abort(); }
  void shutdown() override {
    for (auto* channel : channels())
      if (channel->last != nullptr) channel->last->wait(channel->last_number);
  }

  // -- collectives ----------------------------------------------------------------------------------------------------

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const auto memory = only(tensors);
    auto send = [memory, sends = rank_ == opts.rootRank] { return sends ? one(memory) : none(); };
    auto receive = [memory, root = opts.rootRank](auto& found) { put_bytes(memory, found[root]); };
    return call(c10d::OpType::BROADCAST, c10::str("broadcast from ", opts.rootRank), tensors, tensors, opts, send,
                receive, memory);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const auto memory = only(tensors);
    auto receive = [memory, op = opts.reduceOp](auto& found) { reduce_into(memory, found, op); };
    return call(c10d::OpType::ALLREDUCE, c10::str("all_reduce ", int(opts.reduceOp.op_)), tensors, tensors, opts,
                [memory] { return one(memory); }, receive, memory);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return in_batch([&] {
      for (auto& tensor : tensors) {
        Tensors own{tensor};
        allreduce(own, opts);
      }
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const auto memory = only(tensors);
    auto receive = [memory, op = opts.reduceOp, is_root = rank_ == opts.rootRank](auto& found) {
      if (is_root) reduce_into(memory, found, op);
    };
    return call(c10d::OpType::REDUCE, c10::str("reduce ", int(opts.reduceOp.op_), " to ", opts.rootRank), tensors,
                tensors, opts, [memory] { return one(memory); }, receive, memory);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    check_sizes(output, input, "all_gather_into_tensor");
    return gather_all(c10d::OpType::_ALLGATHER_BASE, rows_of(output), input, {output}, opts);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return gather_all(c10d::OpType::ALLGATHER, outputs.at(0), inputs.at(0), outputs.at(0), opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return in_batch([&] {
      for (size_t at = 0; at < inputs.size(); ++at) _allgather_base(outputs[at], inputs[at], opts);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    check_sizes(input, output, "reduce_scatter_tensor");
    return scatter_sums(c10d::OpType::_REDUCE_SCATTER_BASE, output, rows_of(input), {input}, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return scatter_sums(c10d::OpType::REDUCE_SCATTER, outputs.at(0), inputs.at(0), inputs.at(0), opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return in_batch([&] {
      for (size_t at = 0; at < inputs.size(); ++at) _reduce_scatter_base(outputs[at], inputs[at], opts);
    });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    return exchange_all(rows_of(output, output_sizes), rows_of(input, input_sizes), {output}, {input}, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return exchange_all(outputs, inputs, outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    const auto memory = only(inputs);
    const auto rows = rank_ == opts.rootRank ? shadows(outputs.at(0)) : Tensors();
    auto receive = [rows](auto& found) {
      for (size_t rank = 0; rank < rows.size(); ++rank) put_bytes(rows[rank], found[rank]);
    };
    return call(c10d::OpType::GATHER, c10::str("gather to ", opts.rootRank), inputs,
                rows.empty() ? Tensors() : outputs[0], opts, [memory] { return one(memory); }, receive, memory);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    const auto memory = only(outputs);
    const auto rows = rank_ == opts.rootRank ? shadows(inputs.at(0)) : Tensors();
    auto receive = [memory, root = opts.rootRank](auto& found) { put_bytes(memory, found[root]); };
    return call(c10d::OpType::SCATTER, c10::str("scatter from ", opts.rootRank), rows.empty() ? Tensors() : inputs[0],
                outputs, opts, [rows] { return each(rows); }, receive, memory);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    const int device = !opts.device_ids.empty() ? int(opts.device_ids[0])
                       : opts.device && opts.device->has_index() ? opts.device->index() : current_device;
    Exchange exchange{&all_, "barrier", none, [](auto&) {}};
    return launch(c10d::OpType::BARRIER, std::move(exchange), device, true, opts.timeout, 0, {}, {});
  }
  WorkPtr send(Tensors& tensors, int other, int tag) override {
    const auto memory = only(tensors);
    return message(c10d::OpType::SEND, rank_, other, tag, tensors, memory, [memory] { return one(memory); },
                   [](auto&) {});
  }
  WorkPtr recv(Tensors& tensors, int other, int tag) override {
    const auto memory = only(tensors);
    return message(c10d::OpType::RECV, other, rank_, tag, tensors, memory, none,
                   [memory, other](auto& found) { put_bytes(memory, found[other]); });
  }
  void startCoalescing() override {
    TORCH_CHECK(!batch_, "a batch of collectives is open");
    batch_.emplace();
  }
  WorkPtr endCoalescing() override {
    auto batch = std::move(*batch_);
    batch_.reset();
    if (batch.exchanges.empty()) return nullptr;
    return launch_all(c10d::OpType::COALESCED, std::move(batch.exchanges), batch.device, true, ::kNoTimeout,
                      batch.nbytes, std::move(batch.outputs), std::move(batch.held));
  }

 private:
  struct Batch {
    std::vector<Exchange> exchanges;
    int device = -1;
    size_t nbytes = 0;
    Tensors outputs, held;
  };

  // Streams of groups, beyond those that torch hands out.
  struct StreamIds {
    std::mutex lock;
    std::vector<int64_t> free;
    int64_t next = 1000;
    int64_t take() {
      std::lock_guard<std::mutex> guard(lock);
      if (free.empty()) return next++;
      const auto id = free.back();
      free.pop_back();
      return id;
    }
    void put(int64_t id) {
      std::lock_guard<std::mutex> guard(lock);
      free.push_back(id);
    }
  };
  static StreamIds& ids() {
    static auto* found = new StreamIds();
    return *found;
  }

  static std::vector<Bytes> none() { return {}; }
  static std::vector<Bytes> one(const Tensor& memory) { return {bytes_of(memory)}; }
  static std::vector<Bytes> each(const Tensors& rows) {
    std::vector<Bytes> found;
    for (auto& row : rows) found.push_back(bytes_of(row));
    return found;
  }
  static Tensor checked(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense (lagging device); found one on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (lagging device)");
    return shadow(tensor);
  }
  static Tensors shadows(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(checked(tensor));
    return found;
  }
  static Tensor only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "one tensor was expected; found ", tensors.size());
    return checked(tensors[0]);
  }
  void check_sizes(const Tensor& whole, const Tensor& part, const char* name) const {
    TORCH_CHECK(whole.numel() == part.numel() * size_ && whole.scalar_type() == part.scalar_type(), name, ": ",
                whole.numel(), " elements of ", whole.scalar_type(), " are not ", size_, " times ", part.numel(),
                " of ", part.scalar_type());
  }
  Tensors rows_of(const Tensor& whole, std::vector<int64_t> sizes = {}) const {
    checked(whole);
    const int64_t length = whole.dim() ? whole.size(0) : 0;
    if (sizes.empty()) sizes.assign(size_, (whole.dim() && length % size_ == 0 ? length : whole.numel()) / size_);
    const auto total = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    TORCH_CHECK(total == length || total == whole.numel(), "parts of ", total, " rows are not ", length);
    const int64_t width = total == length && length ? whole.numel() / length : 1;
    Tensors rows;
    int64_t start = 0;
    for (auto size : sizes) {
      rows.push_back(at::as_strided(whole, {size * width}, {1}, whole.storage_offset() + start));
      start += size * width;
    }
    return rows;
  }

  // The sum (or what `op` says) in the order of ranks, as every rank has it.
  static void reduce_into(const Tensor& memory, const std::vector<Bytes>& found, const c10d::ReduceOp& op) {
    Tensor sum, part = at::empty_like(memory);
    for (size_t rank = 0; rank < found.size(); ++rank) {
      put_bytes(part, found[rank]);
      if (rank == 0) sum = part.clone();
      else if (op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG) sum.add_(part);
      else if (op.op_ == c10d::ReduceOp::PRODUCT) sum.mul_(part);
      else if (op.op_ == c10d::ReduceOp::MIN) sum.copy_(at::minimum(sum, part));
      else if (op.op_ == c10d::ReduceOp::MAX) sum.copy_(at::maximum(sum, part));
      else TORCH_CHECK(false, "lagging device: no reduction ", int(op.op_));
    }
    if (op.op_ == c10d::ReduceOp::AVG) sum.div_(double(found.size()));
    memory.copy_(sum);
  }

  template <class Options>
  WorkPtr gather_all(c10d::OpType type, const Tensors& rows, const Tensor& input, Tensors outputs, const Options& opts) {
    const auto memory = checked(input);
    auto receive = [to = shadows(rows)](auto& found) {
      for (size_t rank = 0; rank < to.size(); ++rank) put_bytes(to[rank], found[rank]);
    };
    return call(type, "all_gather", {input}, std::move(outputs), opts, [memory] { return one(memory); }, receive,
                memory);
  }
  template <class Options>
  WorkPtr scatter_sums(c10d::OpType type, const Tensor& output, const Tensors& rows, Tensors inputs,
                       const Options& opts) {
    const auto memory = checked(output);
    auto receive = [memory, op = opts.reduceOp](auto& found) { reduce_into(memory, found, op); };
    return call(type, c10::str("reduce_scatter ", int(opts.reduceOp.op_)), std::move(inputs), {output}, opts,
                [from = shadows(rows)] { return each(from); }, receive, memory);
  }
  template <class Options>
  WorkPtr exchange_all(const Tensors& to, const Tensors& from, Tensors outputs, Tensors inputs, const Options& opts) {
    auto receive = [to = shadows(to)](auto& found) {
      for (size_t rank = 0; rank < to.size(); ++rank) put_bytes(to[rank], found[rank]);
    };
    const auto what = c10::str("all_to_all of ", outputs.at(0).scalar_type());
    return call(c10d::OpType::ALLTOALL_BASE, what, std::move(inputs), std::move(outputs), opts, [from = shadows(from)] { return each(from); }, receive, Tensor());
  }

  // `memory`: of a size that is the same on every rank.
  template <class Options>
  WorkPtr call(c10d::OpType type, std::string what, Tensors inputs, Tensors outputs, const Options& opts,
               std::function<std::vector<Bytes>()> send, std::function<void(std::vector<Bytes>&)> receive,
               const Tensor& memory) {
    if (memory.defined()) what += c10::str(" of ", memory.numel(), " ", memory.scalar_type());
    const auto& any = inputs.empty() ? outputs : inputs;
    size_t nbytes = 0;
    for (auto& tensor : inputs) nbytes += tensor.nbytes();
    const int device = any.at(0).device().index();
    Exchange exchange{&all_, std::move(what), std::move(send), std::move(receive)};
    auto held = inputs;
    held.insert(held.end(), outputs.begin(), outputs.end());
    return launch(type, std::move(exchange), device, opts.asyncOp, opts.timeout, nbytes, std::move(outputs),
                  std::move(held));
  }

  WorkPtr message(c10d::OpType type, int source, int target, int tag, const Tensors& tensors, const Tensor& memory,
                  std::function<std::vector<Bytes>()> send, std::function<void(std::vector<Bytes>&)> receive) {
    const auto what = c10::str("message ", tag, " of ", memory.numel(), " ", memory.scalar_type());
    Exchange exchange{&way(source, target), what, std::move(send), std::move(receive)};
    return launch(type, std::move(exchange), tensors[0].device().index(), true, ::kNoTimeout, memory.nbytes(), tensors,
                  tensors);
  }

  // Messages from one rank to another. Both ways share a stream, so that only a batch may have them in any order.
  Channel& way(int source, int target) {
    TORCH_CHECK(source != target, "a rank sends nothing to itself");
    std::lock_guard<std::mutex> guard(lock_);
    auto& found = ways_[{source, target}];
    if (!found) {
      auto& back = ways_[{target, source}];
      found = std::make_unique<Channel>(Channel{c10::str(source, " to ", target), {source, target}});
      found->stream_id = back ? back->stream_id : ids().take();
    }
    return *found;
  }
  std::vector<Channel*> channels() {
    std::lock_guard<std::mutex> guard(lock_);
    std::vector<Channel*> found{&all_};
    for (auto& [ranks, channel] : ways_)
      if (channel) found.push_back(channel.get());
    return found;
  }

  template <class Function>
  WorkPtr in_batch(const Function& function) {
    startCoalescing();
    function();
    return endCoalescing();
  }

  // Returns none while a batch is open: that has one work.
  WorkPtr launch(c10d::OpType type, Exchange exchange, int device, bool is_async, Milliseconds timeout, size_t nbytes,
                 Tensors outputs, Tensors held) {
    counts().add("collective." + exchange.what.substr(0, exchange.what.find(' ')));
    if (!batch_) {
      std::vector<Exchange> exchanges;
      exchanges.push_back(std::move(exchange));
      return launch_all(type, std::move(exchanges), device, is_async, timeout, nbytes, std::move(outputs),
                        std::move(held));
    }
    TORCH_CHECK(batch_->device < 0 || batch_->device == device, "a batch is of one device");
    batch_->device = device;
    batch_->nbytes += nbytes;
    batch_->exchanges.push_back(std::move(exchange));
    batch_->outputs.insert(batch_->outputs.end(), outputs.begin(), outputs.end());
    batch_->held.insert(batch_->held.end(), held.begin(), held.end());
    return nullptr;
  }

  // On the group's stream, behind the caller's; on that itself where the call is not asynchronous, as NCCL does.
  WorkPtr launch_all(c10d::OpType type, std::vector<Exchange> exchanges, int device, bool is_async,
                     Milliseconds timeout, size_t nbytes, Tensors outputs, Tensors held) {
    const auto text = meeting_->error();
    TORCH_CHECK_WITH(DistBackendError, text.empty(), "this group has failed, and starts no collective: ", text);
    if (timeout == ::kNoTimeout || timeout == c10d::kUnsetTimeout) timeout = timeout_;
    std::lock_guard<std::mutex> guard(lock_);
    auto& current = current_stream(device);
    const auto id = exchanges.size() == 1 ? exchanges[0].channel->stream_id : all_.stream_id;
    auto& stream = is_async ? streams().at(device, id) : current;
    if (&stream != &current) stream.note([&current, number = current.num_launched()] { current.wait(number); });
    for (auto& exchange : exchanges) {
      exchange.number = exchange.channel->num_calls++;
      auto* last = exchange.channel->last;
      if (last != nullptr && last != &stream) stream.note([last, number = exchange.channel->last_number] { last->wait(number); });
    }
    std::vector<Channel*> used;
    for (auto& exchange : exchanges) used.push_back(exchange.channel);
    const double rate = settings.comm_bytes_per_s.load();
    auto error = std::make_shared<std::string>();
    auto run = [meeting = meeting_, exchanges = std::move(exchanges), device, error, timeout,
                deadline = Clock::now() + timeout]() mutable {
      *error = meeting->run(exchanges, device, deadline, timeout);
    };
    const auto number = stream.launch(std::move(run), rate > 0 ? double(nbytes) / rate : 0);
    for (auto* channel : used) channel->last = &stream, channel->last_number = number;
    return c10::make_intrusive<LateWork>(type, rank_, device, &stream, error, number, std::move(outputs),
                                         std::move(held));
  }

  std::atomic<Milliseconds> timeout_;
  const std::shared_ptr<Meeting> meeting_;
  std::mutex lock_;
  Channel all_;
  std::map<std::pair<int, int>, std::unique_ptr<Channel>> ways_;
  std::optional<Batch> batch_;
};

// Gives `group` this device's backend, over the group's store.
inline void add_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group, double timeout_s) {
  const auto timeout = std::chrono::duration_cast<Milliseconds>(Seconds(timeout_s));
  c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<LateGroup>(group->getStore(), group->getRank(), group->getSize(), timeout);
  group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

}  // namespace lagging
