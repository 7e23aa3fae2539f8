// scaled_dot_product_attention of split sequences, in modules that know nothing of it. It is met in front of the composite
// kernel.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <absl/algorithm/container.h>
#include <torch/library.h>

#include <span>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/calls/planned_meshes.h>
#include <tessera/dtensor/dispatch/fallback.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/mesh/part_order.h>
#include <tessera/parallel/context/attention_of_parts.h>
#include <tessera/parallel/context/context_scope.h>
#include <tessera/parallel/tensor/key_heads.h>

namespace tessera::internal {

namespace {

using torch::jit::Stack;
constexpr auto kComposite = c10::DispatchKey::CompositeImplicitAutograd;
constexpr size_t kArguments = 8; ///< of scaled_dot_product_attention

/// Whether a tensor is a part of a sequence by its mesh: split along its last dim but one by `split_sequence`.
bool is_split(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto part = meta ? part_dim(meta->spec->mesh()) : std::nullopt;
  if (!part) return false;
  const auto* shard = std::get_if<Shard>(&meta->spec->placements()[static_cast<size_t>(part->dim)]);
  return shard && shard->dim == tensor.dim() - 2;
}

/// Whether a tensor is on a mesh that splits sequences.
bool is_on_parts(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta && part_dim(meta->spec->mesh());
}

/// The arguments of a call of scaled_dot_product_attention.
struct Arguments {
  explicit Arguments(const Stack& stack) : values(std::span(stack).last(kArguments)) {}
  const at::Tensor& tensor(size_t i) const { return values[i].toTensor(); }

  /// Whether query, key and value are parts of sequences that their meshes split.
  bool are_split() const { return is_split(tensor(0)) || is_split(tensor(1)) || is_split(tensor(2)); }
  /// Whether they are parts of sequences that the mesh of the scope splits: plain, or of tensor parallelism.
  bool are_parts_of_scope() const {
    const auto* scope = context_scope();
    return scope && scope->mesh.defined() && !is_on_parts(tensor(0)) && !is_on_parts(tensor(1)) && !is_on_parts(tensor(2));
  }
  bool are_parts() const { return are_split() || are_parts_of_scope(); }
  ContextAttentionOptions options() const {
    const auto dropout = values[4].toDouble();
    TORCH_CHECK_NOT_IMPLEMENTED(dropout == 0,
                                "scaled_dot_product_attention of a split sequence: dropout of the attention's weights (", dropout,
                                ") is not possible under context parallelism; set it to 0");
    ContextAttentionOptions options;
    if (const auto* scope = context_scope()) options.scheme = scope->scheme;
    if (!values[3].isNone() && tensor(3).defined()) options.mask = tensor(3);
    options.is_causal = values[5].toBool();
    if (!values[6].isNone()) options.scale = values[6].toDouble();
    return options;
  }

  std::span<const c10::IValue> values;
};

/// Where key heads do not divide among the ranks of tensor parallelism, each rank takes those of its query heads.
void give_own_key_heads(Stack& stack) {
  const auto values = std::span(stack).last(kArguments);
  const auto &query = values[0].toTensor(), &key = values[1].toTensor(), &value = values[2].toTensor();
  const bool is_grouped = values[7].toBool();
  if (!parallel::has_more_key_heads(query, key, is_grouped) || !parallel::has_more_key_heads(query, value, is_grouped)) return;
  if (!dispatch::is_planned(dtensor_meta(query)->spec->mesh())) return;
  values[1] = parallel::own_key_heads(query, key);
  values[2] = parallel::own_key_heads(query, values[2].toTensor());
}

} // namespace

bool run_attention_of_parts(Stack& stack) {
  const Arguments arguments(stack);
  if (!arguments.are_parts()) {
    give_own_key_heads(stack);
    return false;
  }
  const auto options = arguments.options();
  const auto &query = arguments.tensor(0), &key = arguments.tensor(1), &value = arguments.tensor(2);
  auto out = arguments.are_split() ? context_parallel_attention(query, key, value, options)
                                   : context_parallel_attention(query, key, value, context_scope()->mesh, options);
  torch::jit::drop(stack, arguments.values.size());
  torch::jit::push(stack, std::move(out));
  return true;
}

namespace {

void attention(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  if (run_attention_of_parts(*stack)) return;
  const auto on_meta = Arguments(*stack).tensor(0).is_meta() ? attention_on_meta.load() : nullptr;
  if (on_meta) return on_meta(op, *stack);
  op.callBoxedForDispatchKey(kComposite, *stack);
}

/// Meets the same calls where the keys of autograd are left out, as in InferenceMode.
void attention_of_dtensors(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (Arguments(*stack).are_parts()) return attention(op, keys, stack);
  give_own_key_heads(*stack);
  dispatch::run(op, keys, stack);
}

/// Layers that go along a sequence, which would see this rank's part alone. Those of split DTensors have rules.
void refuse_parts(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const auto* scope = context_scope();
  if (scope && scope->mesh.defined()) {
    const auto arguments = std::span(*stack).last(op.schema().arguments().size());
    const bool has_rule =
        absl::c_any_of(arguments, [](const auto& value) { return value.isTensor() && is_on_parts(value.toTensor()); });
    TORCH_CHECK_NOT_IMPLEMENTED(
        has_rule, op.schema().name(),
        " in a ContextParallelScope with a mesh: it would see this rank's part of the sequence alone, and "
        "context parallelism changes attention only. Call it outside of the scope, on the whole sequence");
  }
  op.callBoxedForDispatchKey(kComposite, *stack);
}

constexpr const char* kAlongSequences[] = {"gru.input",
                                           "gru.data",
                                           "lstm.input",
                                           "lstm.data",
                                           "rnn_tanh.input",
                                           "rnn_tanh.data",
                                           "rnn_relu.input",
                                           "rnn_relu.data",
                                           "conv1d",
                                           "conv2d",
                                           "conv3d",
                                           "conv1d.padding",
                                           "conv2d.padding",
                                           "conv3d.padding",
                                           "conv_tbc",
                                           "conv_transpose1d",
                                           "conv_transpose2d.input",
                                           "conv_transpose3d.input"};

void meet_attention(torch::Library& library) {
  library.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&attention>());
}

void meet(torch::Library& library) {
  meet_attention(library);
  for (const auto* name : kAlongSequences) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_parts>());
}

} // namespace

} // namespace tessera::internal

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { tessera::internal::meet(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { tessera::internal::meet(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { tessera::internal::meet(library); }

TORCH_LIBRARY_IMPL(aten, Fake, library) {
  library.impl("scaled_dot_product_attention",
               torch::CppFunction::makeFromBoxedFunction<&tessera::internal::attention_of_dtensors>());
}
