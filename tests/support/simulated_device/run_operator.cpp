#include <tessera/tests/support/simulated_device/run_operator.h>

#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/cuda_launches.h>
#include <tessera/tests/support/simulated_device/hooks.h>
#include <tessera/tests/support/simulated_device/operator_traits.h>
#include <tessera/tests/support/simulated_device/outcome.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <utility>

namespace tessera::testing::sim {

namespace {

using Kind = OperatorTraits::Kind;

/// One call of an operator.
struct Call {
  const c10::OperatorHandle& op;
  const OperatorTraits& traits;
  const Stack& arguments;

  const std::string& name() const { return op.schema().name(); }

  void launch(std::vector<Use> uses, std::function<void()> work) const {
    auto& runtime = Runtime::get();
    runtime.launch(current_stream(), {name(), std::move(uses), std::move(work), runtime.time_line().work_us(name()),
                                      cuda_launches(name(), arguments)});
  }

  std::vector<Use> uses() const {
    std::vector<Use> uses;
    for (size_t i = 0; i < arguments.size(); ++i)
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (is_on_device(tensor)) uses.push_back({Region::of(tensor), traits.is_written[i]});
      });
    return uses;
  }
};

/// A tensor of the host among those of the device: a number, those of a list's positions, or indices. Its value counts now, not
/// when the work runs.
at::Tensor host_argument(const Call& call, const at::Tensor& tensor) {
  const bool may_have_dims = call.name().find("index") != std::string::npos || call.name().find("_foreach_") != std::string::npos;
  TORCH_CHECK(tensor.dim() == 0 || may_have_dims, call.name(), ": a tensor of sizes ", tensor.sizes(), " on ", tensor.device(),
              " among tensors on the simulated device");
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

/// What the CPU's kernel gets: tensors over the memory of the arguments.
Stack cpu_arguments(const Call& call) {
  Aliases aliases(c10::kCPU);
  return map_arguments(call.arguments, c10::kCPU, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return tensor.is_cpu() ? host_argument(call, tensor) : aliases.of(tensor);
  });
}

/// `result`, computed on the host, as a tensor of the device.
at::Tensor to_device(const Call& call, const at::Tensor& result) {
  if (!result.defined()) return result;
  auto output = TensorLayout::of(result).allocate();
  call.launch({{Region::of(output), true}}, [to = Aliases(c10::kCPU).of(output), result] { to.copy_(result); });
  return output;
}

Stack run_synchronously(const Call& call) {
  struct Results {
    Stack stack;
    std::exception_ptr error;
  };
  const auto results = std::make_shared<Results>();
  call.launch(call.uses(), [op = call.op, arguments = cpu_arguments(call), results]() mutable {
    try {
      results->stack = sim::call(op, std::move(arguments));
    } catch (...) {
      results->error = std::current_exception();
    }
  });
  Runtime::get().synchronize(current_stream(), call.name());
  if (results->error) std::rethrow_exception(results->error);
  Stack returned;
  for (size_t i = 0; i < results->stack.size(); ++i) {
    const auto argument = call.traits.returns[i].argument;
    returned.push_back(argument ? call.arguments[*argument] : map_tensors(results->stack[i], [&](const at::Tensor& result) {
      return to_device(call, result);
    }));
  }
  return returned;
}

/// Runs on the layout alone; the results get the memory of the argument.
Stack run_view(const Call& call) {
  Aliases aliases(c10::kMeta);
  at::Tensor base;
  const auto on_meta = map_arguments(call.arguments, c10::kMeta, [&](const at::Tensor& tensor) {
    if (!is_on_device(tensor)) return tensor;
    if (!base.defined()) base = tensor;
    return aliases.of(tensor);
  });
  Stack returned;
  for (const auto& result : sim::call(call.op, on_meta))
    returned.push_back(map_tensors(result, [&](const at::Tensor& meta) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                           meta.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
      return view;
    }));
  return returned;
}

/// Draws on the host in program order: the numbers depend neither on the streams nor on their delays.
Stack run_random(const Call& call) {
  if (call.traits.reads_tensors) return run_synchronously(call);
  const auto drawn = map_arguments(call.arguments, c10::kCPU, [](const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  });
  sim::call(call.op, drawn);
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.traits.is_written[i] || !call.arguments[i].isTensor()) continue;
    const auto& written = call.arguments[i].toTensor();
    call.launch({{Region::of(written), true}},
                [to = Aliases(c10::kCPU).of(written), from = drawn[i].toTensor()] { to.copy_(from); });
  }
  Stack returned;
  for (const auto& result : call.traits.returns) returned.push_back(call.arguments[result.argument.value()]);
  return returned;
}

/// The outputs of a call that are new tensors, by return.
struct Outputs {
  std::vector<std::vector<at::Tensor>> made, on_cpu;

  explicit Outputs(const Call& call, const Outcome& outcome, std::vector<Use>& uses) {
    for (size_t i = 0; i < outcome.returns.size(); ++i) {
      auto& tensors = made.emplace_back();
      auto& aliases = on_cpu.emplace_back();
      if (call.traits.returns[i].argument) continue;
      for (const auto& layout : outcome.returns[i]) {
        const auto& tensor = tensors.emplace_back(layout.allocate());
        aliases.push_back(layout.is_defined ? Aliases(c10::kCPU).of(tensor) : at::Tensor());
        if (layout.is_defined) uses.push_back({Region::of(tensor), true});
      }
    }
  }
};

void copy_results(const std::string& name, const Stack& results, const std::vector<std::vector<at::Tensor>>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].empty()) continue;
    size_t next = 0;
    map_tensors(results[i], [&](const at::Tensor& result) {
      const auto& output = outputs[i].at(next++);
      TORCH_CHECK(output.defined() == result.defined(), name, " gave an undefined tensor where one was inferred, or the reverse");
      if (!output.defined()) return result;
      // LibTorch infers the statistics of an empty input in its own shape, where the CPU's kernel keeps a row's.
      if (name == "aten::native_layer_norm" && output.numel() == 0 && result.numel() == 0) return result;
      TORCH_CHECK(output.sizes() == result.sizes() && output.scalar_type() == result.scalar_type(), name, " gave ",
                  result.scalar_type(), result.sizes(), " where ", output.scalar_type(), output.sizes(), " was inferred");
      return output.copy_(result);
    });
  }
}

Stack run_plain(const Call& call) {
  const auto outcome = Outcome::of(call.op, call.arguments);
  if (!outcome->is_known) return run_synchronously(call);
  for (const auto& [argument, layout] : outcome->resized) {
    const auto& tensor = call.arguments[argument].toTensor();
    sim::resize(tensor, layout.sizes);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
  }
  auto uses = call.uses();
  Outputs outputs(call, *outcome, uses);
  call.launch(std::move(uses), [op = call.op, arguments = cpu_arguments(call), on_cpu = std::move(outputs.on_cpu)]() mutable {
    copy_results(op.schema().name(), sim::call(op, std::move(arguments)), on_cpu);
  });
  Stack returned;
  for (size_t i = 0; i < outcome->returns.size(); ++i) {
    const auto& result = call.traits.returns[i];
    if (result.argument)
      returned.push_back(call.arguments[*result.argument]);
    else if (result.is_list)
      returned.emplace_back(c10::List<at::Tensor>(outputs.made[i]));
    else
      returned.emplace_back(outputs.made[i][0]);
  }
  return returned;
}

Stack run(const Call& call) {
  switch (call.traits.kind) {
    case Kind::kPlain: return run_plain(call);
    case Kind::kView: return run_view(call);
    case Kind::kSynchronous: return run_synchronously(call);
    case Kind::kRandom: return run_random(call);
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// As CUDA's kernels do: in front of a foreach operator nothing counts a version.
void count_writes(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& traits = OperatorTraits::of(op);
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!traits.is_written[i]) continue;
    for_each_tensor(arguments[i], [](const at::Tensor& tensor) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

} // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto count = op.schema().arguments().size();
  const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  for (const auto& value : arguments)
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      TORCH_CHECK(!is_on_device(tensor) || (tensor.layout() == at::kStrided && tensor.has_storage()), op.schema().name(),
                  ": the simulated device has dense tensors only");
    });
  for (auto& result : run({op, OperatorTraits::of(op), arguments})) stack->push_back(std::move(result));
}

void run_foreach_operator(const c10::OperatorHandle& op, Stack* stack) {
  bool is_one_launch = true;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    if (value.isTensorList())
      for_each_tensor(value, [&](const at::Tensor& tensor) { is_one_launch = is_one_launch && is_on_device(tensor); });
  if (is_one_launch) {
    count_writes(op, *stack);
    return run_operator(op, stack);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); // PyTorch's loop over the tensors
}

} // namespace tessera::testing::sim
