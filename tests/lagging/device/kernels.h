// Operators: a call is checked and its outputs are allocated at once; the CPU's kernel runs on the stream's thread.
//
// What is queued refers to device memory by address, and keeps no tensor alive.
#pragma once

#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace lagging {

inline Tensor to_meta(const Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;  // a number
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, const Function& function) {
  auto apply = [&](const Tensor& tensor) { return tensor.defined() ? function(tensor) : tensor; };
  if (value.isTensor()) return apply(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorVector()) found.push_back(apply(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      found.push_back(tensor ? std::optional<Tensor>(apply(*tensor)) : tensor);
    return found;
  }
  return value;
}

// One call of an operator that has no kernel of its own here.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)), device_(find_device()) {}

  torch::jit::Stack launch() {
    DeviceScope scope(device_);
    if (op_.hasTag(at::Tag::dynamic_output_shape) || !find_results()) return run_now();
    auto late = late_arguments();
    std::vector<Tensor> targets;
    for (auto& result : made_) targets.push_back(result.defined() ? shadow(result) : result);
    counts().add("kernel");
    current_stream(device_).launch(
        [op = op_, late = std::move(late), targets = std::move(targets)]() mutable { run(op, late, targets); },
        least_s());
    return results_;
  }

 private:
  // By `kernel_s`, or that of a product of matrices by `flops_per_s`.
  double least_s() const {
    const double rate = settings.flops_per_s.load();
    if (rate <= 0 || schema_.name() != "aten::mm") return settings.kernel_s.load();
    return 2.0 * arguments_[0].toTensor().numel() * arguments_[1].toTensor().size(1) / rate;
  }

  static void run(const c10::OperatorHandle& op, torch::jit::Stack& stack, const std::vector<Tensor>& targets) {
    at::AutoDispatchBelowAutograd below;
    op.callBoxed(&stack);
    size_t at = 0;
    auto put = [&](const Tensor& found) {
      auto& target = targets[at++];
      if (target.defined() && found.defined()) target.copy_(found);
      return found;
    };
    for (auto& value : stack) map_tensors_all(value, put);
  }

  // Undefined tensors too, so that results and targets stay in step.
  template <class Function>
  static void map_tensors_all(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) function(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) function(tensor);
  }

  bool is_index() const { return schema_.name().find("index") != std::string::npos; }

  // The device of the call. Raises torch's error of tensors on several devices.
  int find_device() const {
    int found = -1;
    for (auto& argument : arguments_) {
      map_tensors(argument, [&](const Tensor& tensor) {
        if (!tensor.is_cuda()) {
          TORCH_CHECK(tensor.dim() == 0 || is_index() || !tensor.is_cpu(),
                      "Expected all tensors to be on the same device, but found at least two devices, cuda and ",
                      tensor.device(), "! (", schema_.name(), " on the lagging device)");
          return tensor;
        }
        TORCH_CHECK(found < 0 || found == tensor.device().index() || tensor.dim() == 0,
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:", found,
                    " and ", tensor.device(), "!");
        if (found < 0) found = tensor.device().index();
        return tensor;
      });
      if (argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index())
        found = argument.toDevice().index();
    }
    return found < 0 ? current_device : found;
  }

  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }

  // The argument that a result is, or none.
  std::optional<size_t> argument_of(const c10::Argument& result) const {
    if (result.alias_info() == nullptr) return std::nullopt;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      auto* alias = schema_.arguments()[at].alias_info();
      if (alias == nullptr || alias->beforeSets() != result.alias_info()->beforeSets()) continue;
      TORCH_CHECK(alias->isWrite(), "lagging device: ", schema_.name(), " returns a view, and has no kernel");
      return at;
    }
    TORCH_CHECK(false, "lagging device: ", schema_.name(), " returns an alias of no argument");
  }

  // Fills results_ and made_ (those that are no arguments); false where only the kernel knows what it returns.
  bool find_results() {
    const auto& returns = schema_.returns();
    bool all_are_arguments = schema_.overload_name().find("out") == std::string::npos;
    for (auto& result : returns) all_are_arguments = all_are_arguments && argument_of(result).has_value();
    torch::jit::Stack metas;
    if (!all_are_arguments && !infer(metas)) return false;
    for (size_t at = 0; at < returns.size(); ++at) {
      if (auto argument = argument_of(returns[at])) {
        results_.push_back(arguments_[*argument]);
        map_tensors_all(results_.back(), [&](const Tensor&) { made_.emplace_back(); });
        continue;
      }
      if (!metas[at].isTensor() && !metas[at].isTensorList()) return false;
      results_.push_back(map_tensors(metas[at], [&](const Tensor& meta) { return make_like(meta); }));
      map_tensors_all(results_.back(), [&](const Tensor& tensor) { made_.push_back(tensor); });
    }
    return true;
  }

  // The results' shapes by the meta kernel; also gives `out` arguments their sizes.
  bool infer(torch::jit::Stack& stack) {
    for (auto& argument : arguments_)
      stack.push_back(argument.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : map_tensors(argument, to_meta));
    const auto metas = stack;
    try {
      at::AutoDispatchBelowAutograd below;
      op_.callBoxed(&stack);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception&) {
      counts().add("no_meta." + schema_.name());
      return false;
    }
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!is_written(schema_.arguments()[at]) || !arguments_[at].isTensor()) continue;
      auto tensor = arguments_[at].toTensor();
      if (tensor.defined() && tensor.sizes() != metas[at].toTensor().sizes())
        tensor.resize_(metas[at].toTensor().sizes());
    }
    use_dtypes_of_cpu(stack);
    return true;
  }

  // The CPU's layer norm keeps statistics in the parameters' dtype, and wants them so in backward.
  void use_dtypes_of_cpu(torch::jit::Stack& metas) const {
    if (schema_.name() != "aten::native_layer_norm") return;
    const auto input = arguments_[0].toTensor();
    const auto dtype = arguments_[2].isTensor() && arguments_[2].toTensor().defined()
                           ? arguments_[2].toTensor().scalar_type() : input.scalar_type();
    for (size_t at = 1; at < 3; ++at) metas[at] = at::empty_like(metas[at].toTensor(), dtype);
  }

  Tensor make_like(const Tensor& meta) const {
    const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(device_));
    return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
  }

  // The arguments for a stream's thread: device tensors by address, host tensors and random numbers as they are now.
  torch::jit::Stack late_arguments() const {
    torch::jit::Stack found;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      auto& argument = arguments_[at];
      auto& name = schema_.arguments()[at].name();
      if (argument.isDevice()) {
        found.emplace_back(c10::Device(at::kCPU));
      } else if (name == "pin_memory") {
        found.emplace_back();
      } else if (name == "generator") {
        auto generator = argument.isNone() ? default_generator(device_) : argument.toGenerator();
        auto* own = static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl());
        found.emplace_back(at::detail::createCPUGenerator(own->draw()));
      } else {
        auto late = [](const Tensor& each) { return is_ours(each) ? shadow(each) : copied(each); };
        found.push_back(map_tensors(argument, late));
      }
    }
    return found;
  }

  static Tensor copied(const Tensor& tensor) {
    auto copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  // As CUDA does where the results depend on values: wait, then allocate.
  torch::jit::Stack run_now() {
    auto& stream = current_stream(device_);
    wait_for(stream, stream.num_launched(), schema_.name());
    auto stack = late_arguments();
    const auto late = stack;
    at::AutoDispatchBelowAutograd below;
    op_.callBoxed(&stack);
    for (size_t at = 0; at < arguments_.size(); ++at) {  // `out` tensors that the kernel gave another size
      if (!is_written(schema_.arguments()[at]) || !arguments_[at].isTensor()) continue;
      const auto found = late[at].toTensor(), own = arguments_[at].toTensor();
      if (own.sizes() == found.sizes()) continue;
      own.resize_(found.sizes());
      shadow(own).copy_(found);
    }
    results_.clear();
    for (size_t at = 0; at < schema_.returns().size(); ++at) {
      if (auto argument = argument_of(schema_.returns()[at])) {
        results_.push_back(arguments_[*argument]);
        continue;
      }
      results_.push_back(map_tensors(stack[at], [&](const Tensor& found) {
        auto made = make_like(found);
        if (found.numel()) shadow(made).copy_(found);
        return made;
      }));
    }
    return results_;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const torch::jit::Stack arguments_;
  const int device_;
  torch::jit::Stack results_;
  std::vector<Tensor> made_;
};

inline void call_late(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  auto results = Call(op, torch::jit::Stack(stack->begin() + first, stack->end())).launch();
  stack->erase(stack->begin() + first, stack->end());
  for (auto& result : results) stack->push_back(std::move(result));
}

// By `bernoulli_`, which takes a generator: its draw is of the launch.
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::empty_like(input, at::kBool).fill_(true)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

}  // namespace lagging
