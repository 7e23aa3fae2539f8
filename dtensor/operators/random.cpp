#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/rrelu_with_noise.h>

#include <algorithm>
#include <array>
#include <numeric>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera::internal::rules {

namespace {

/// Only the tensor that is filled is split; others (probabilities) are whole, and meet the whole of it alone: how their dims lie
/// beside those of a part does not matter.
Factorization draw(const OpCall& call) {
  auto factors = first_input_factors(call);
  for (size_t i = 1; i < factors.inputs.size(); ++i) factors.inputs[i].sizes.clear();
  factors.outputs.push_back(factors.inputs[0]);
  factors.ragged = RaggedUse::kMerged;
  return factors;
}

/// The state of the generator that `call` draws from, of `device`.
at::Tensor generator_state(const LocalCall& call, at::Device device) {
  const auto* given = call.find("generator");
  auto generator = given && !given->isNone() ? given->toGenerator() : at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// Checks inside StrictSharding: ranks whose generators differ would draw parts of different tensors.
void check_generators(const LocalCall& call, const Spec& spec, at::Device device) {
  const auto& mesh = spec.mesh();
  if (C10_LIKELY(!program_scopes().strict_sharding) || !spec.on_mesh() || mesh.size() == 1) return;
  const auto name = call.op.operator_name().name;
  const auto mine = generator_state(call, device).to(mesh.device()); // a part that is offloaded lies on the host
  const auto states = at::empty({mesh.size(), mine.numel()}, mine.options());
  mesh.flatten().communicator()->all_gather_into(states.view(-1), mine, name + ": the generator's state").wait();
  const auto differ = states.ne(states[0]).any(1).cpu();
  for (int64_t r = 0; r < mesh.size(); ++r) {
    TORCH_CHECK(!differ[r].item<bool>(), name, ": the random generator of rank ", mesh.ranks()[r],
                " has another state than rank ", mesh.ranks()[0],
                "'s, so the ranks would draw parts of different tensors. Seed it on every rank with one number "
                "(torch::manual_seed) before DTensors are drawn; tessera::manual_seed gives each rank another one");
  }
}

/// The operator on `buffer` in place of its first argument, which it fills or, without the underscore, only looks at.
at::Tensor draw_into(const LocalCall& call, const at::Tensor& buffer) {
  std::vector<c10::IValue> stack(call.stack->begin() + static_cast<int64_t>(call.begin()), call.stack->end());
  stack[0] = buffer;
  call.op.callBoxed(stack);
  return stack.back().toTensor();
}

/// Copies what `spec` keeps of rows `begin`… of dim 0.
void keep_part(const at::Tensor& local, const Spec& spec, at::Tensor rows, int64_t begin) {
  auto offset = begin;
  if (const auto* ragged = spec.ragged()) {
    rows = rows.flatten(0, ragged->dim);
    offset *= product(spec.sizes(), 1, ragged->dim + 1);
  }
  for (int64_t d = 1; d < rows.dim(); ++d) rows = rows.narrow(d, spec.local_offsets()[d], local.size(d));
  const auto mine = spec.local_offsets()[0];
  const auto first = std::max(offset, mine), last = std::min(offset + rows.size(0), mine + local.size(0));
  if (first < last) local.narrow(0, first - mine, last - first).copy_(rows.narrow(0, first - offset, last - first));
}

/// Operators whose CPU kernels draw one element after another, so that pieces give what the whole would. (Where MKL draws, the
/// kernel starts a stream of its own with every call.) normal_ draws 16 at a time when it has as many.
bool draws_in_order(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::normal_" || name == "aten::uniform_" || name == "aten::random_" || name == "aten::cauchy_" ||
         name == "aten::log_normal_" || name == "aten::geometric_";
}

constexpr int64_t kPiece = int64_t{1} << 16, kBlock = 16;

/// Draws the whole tensor, as one device would, and keeps this rank's part: the same values for every placement. In pieces of
/// rows where the generator allows it.
void draw_local(const LocalCall& call) {
  const bool in_place = call.op.schema().arguments()[0].alias_info() != nullptr;
  auto local = call.arg(0).toTensor();
  const auto& spec = *call.inputs[0];
  const auto& sizes = spec.sizes();
  const auto numel = spec.numel();
  check_generators(call, spec, local.device());
  if (spec.is_replicated() && local.strides() == c10::IntArrayRef(spec.strides())) return call.op.callBoxed(*call.stack);
  if (!in_place) local = at::empty_like(local);
  const bool one_range =
      ragged_is_one_range(spec.placements()) && std::none_of(spec.placements().begin(), spec.placements().end(), is_strided);
  const bool in_pieces = local.is_cpu() && one_range && !spec.has_partial() && numel > kPiece && draws_in_order(call.op) &&
                         spec.strides() == contiguous_strides(sizes);
  const auto row = in_pieces ? numel / sizes[0] : 1;
  const auto step = kBlock / std::gcd(row, kBlock); // rows that make whole blocks
  const auto rows = std::max<int64_t>(1, kPiece / (row * step)) * step;
  for (int64_t begin = 0, end; in_pieces && begin < sizes[0]; begin = end) {
    end = sizes[0] - begin < rows + step ? sizes[0] : begin + rows; // the last piece is no shorter than a block
    auto piece = sizes;
    piece[0] = end - begin;
    keep_part(local, spec, draw_into(call, at::empty(piece, local.options())), begin);
  }
  if (!in_pieces) {
    const auto whole = draw_into(call, at::empty_strided(sizes, spec.strides(), local.options()));
    local.copy_(redistribute_local(whole, *spec.with(Placements(spec.placements().size())), spec, call.op.operator_name().name));
  }
  call.finish(local);
}

Factorization dropout(const OpCall& call) {
  auto factors = draw(call);
  factors.outputs.push_back(factors.outputs[0]); // the mask
  return factors;
}

/// native_dropout(input, p, train), which dropout is on CUDA: the mask is drawn whole, as one device would, and its part applied.
void dropout_local(const LocalCall& call) {
  const auto input = call.arg(0).toTensor();
  const auto& spec = *call.inputs[0];
  const bool train = call.arg(2).isNone() || call.arg(2).toBool();
  if (train) check_generators(call, spec, input.device());
  const bool as_one_device = spec.is_replicated() && input.strides() == c10::IntArrayRef(spec.strides());
  if (!train || as_one_device) return call.op.callBoxed(*call.stack);
  const auto p = call.arg(1).toDouble(), scale = p == 1 ? 0 : 1 / (1 - p);
  const auto ones = at::empty_strided(spec.sizes(), spec.strides(), input.options()).fill_(1);
  const auto whole = std::get<1>(at::native_dropout(ones, p, train));
  const auto replicated = spec.with(Placements(spec.placements().size()));
  const auto mask = redistribute_local(whole, *replicated, spec, call.op.operator_name().name).contiguous();
  auto output = input.is_cuda() ? at::native_dropout_backward(input, mask, scale) : input.mul(mask).mul_(scale);
  const auto* out = call.find("out0");
  const auto results = out ? std::array{out->toTensor().copy_(output), call.find("out1")->toTensor().copy_(mask)}
                           : std::array{std::move(output), mask};
  call.finish(results[0]);
  call.stack->emplace_back(results[1]);
}

/// rrelu_with_noise(self, noise, …): it draws a slope where self is not positive, so that the draws depend on all of self. That
/// is gathered also where it is written, and each rank keeps its part.
void rrelu_local(const LocalCall& call) {
  const auto self = call.arg(0).toTensor(), noise = call.arg(1).toTensor();
  const auto& spec = *call.inputs[0];
  const bool trains = call.find("training")->toBool();
  if (trains) check_generators(call, spec, self.device());
  const bool as_one_device = spec.is_replicated() && self.strides() == c10::IntArrayRef(spec.strides());
  if (!trains || as_one_device) return call.op.callBoxed(*call.stack);
  const auto name = call.op.operator_name().name;
  const auto replicated = spec.with(Placements(spec.placements().size()));
  const auto whole = at::empty_strided(spec.sizes(), spec.strides(), self.options());
  whole.copy_(redistribute_local(self, spec, *replicated, name));
  auto slopes = at::empty_like(whole);
  const auto drawn = at::rrelu_with_noise(whole, slopes, call.find("lower")->toScalar(), call.find("upper")->toScalar(), trains,
                                          call.find("generator")->toOptional<at::Generator>());
  const auto part = [&](const at::Tensor& tensor) { return redistribute_local(tensor, *replicated, spec, name); };
  noise.copy_(part(slopes));
  const bool in_place = call.op.schema().arguments()[0].alias_info() != nullptr;
  in_place ? call.finish(self.copy_(part(drawn))) : call.finish_out(part(drawn).contiguous());
}

/// torch::nn::init::eye_: the matrix goes whole into the out= argument, which keeps its part.
void eye_out(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto out = stack->back().toTensor();
  const auto count = op.schema().arguments().size(), begin = stack->size() - count;
  const auto rows = (*stack)[begin].toInt(), columns = count > 2 ? (*stack)[begin + 1].toInt() : rows;
  TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == columns, op.operator_name(), ": out= has shape ",
              out.sizes(), ", not [", rows, ", ", columns, "]; a DTensor is not resized");
  out.copy_(at::eye(rows, columns, at::TensorOptions().dtype(out.dtype()).device(out.device())));
  stack->resize(begin);
  stack->emplace_back(out);
}

} // namespace

void register_random(Registry& registry) {
  registry.add(
      "uniform. normal. random. random.from random.to exponential. cauchy. log_normal. geometric. bernoulli.float "
      "bernoulli.Tensor",
      OnLocals(draw).run(draw_local));
  registry.add("native_dropout", OnLocals(dropout).run(dropout_local));
  registry.add("bernoulli. bernoulli.p", Decompose{});
  registry.add("rrelu_with_noise", OnLocals(pointwise_factors).run(rrelu_local));
  registry.add("eye.out eye.m_out", Handler(eye_out));
}

} // namespace tessera::internal::rules
