#include <tessera/parallel/context_attention.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/mesh/part_order.h>
#include <tessera/parallel/context/attention_call.h>
#include <tessera/parallel/context/context_scope.h>
#include <tessera/parallel/context/spread_heads.h>

namespace tessera {

namespace internal {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using AttentionCallPtr = c10::intrusive_ptr<AttentionCall>;

/// One rank exchanges nothing.
ContextParallel scheme_of(const AttentionCall& call) { return call.ranks() == 1 ? ContextParallel::kAllGather : call.scheme; }

AttentionResult run_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  switch (scheme_of(call)) {
    case ContextParallel::kAllGather: return all_gather_forward(call, query, key, value);
    case ContextParallel::kRing: return ring_forward(call, query, key, value);
    case ContextParallel::kUlysses: return ulysses_forward(call, query, key, value);
  }
  TORCH_CHECK_VALUE(false, kContextCaller, ": scheme ", static_cast<int>(call.scheme), " is none");
}

BlockGradients run_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient) {
  switch (scheme_of(call)) {
    case ContextParallel::kAllGather: return all_gather_backward(call, kept, gradient);
    case ContextParallel::kRing: return ring_backward(call, kept, gradient);
    case ContextParallel::kUlysses: return ulysses_backward(call, kept, gradient);
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// Attention of this rank's parts, of 4 dims.
struct SplitAttention : torch::autograd::Function<SplitAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const AttentionCallPtr& call) {
    auto [out, kept] = run_forward(*call, query, key, value);
    context->save_for_backward({kept.query, kept.key, kept.value, kept.out, kept.lse});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kContextCaller, ": its gradient has no derivative (create_graph)");
    const auto held = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const AttentionCall&>(*held);
    const auto kept = context->get_saved_variables();
    const auto result =
        run_backward(call, {kept[0], kept[1], kept[2], kept[3], kept[4]}, gradients[0].to(kept[0].scalar_type()).contiguous());
    return {result.query, result.key, result.value, {}};
  }
};

/// Batch and heads, of size 1 where a tensor has none.
at::Tensor with_four_dims(at::Tensor tensor) {
  while (tensor.dim() < 4) tensor = tensor.unsqueeze(-3);
  return tensor;
}

void check_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  TORCH_CHECK_VALUE(query.dim() >= 2 && query.dim() <= 4 && key.dim() == query.dim() && value.dim() == query.dim(),
                    kContextCaller, ": query, key and value have ", query.dim(), ", ", key.dim(), " and ", value.dim(),
                    " dims; they are [batch, heads, length, features], or lack heads, or batch and heads");
  const auto shapes = c10::str("; query, key and value are ", query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  TORCH_CHECK_VALUE(
      query.is_floating_point() && key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(),
      kContextCaller, ": query, key and value are ", query.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type(),
      "; they are of one floating-point dtype");
  TORCH_CHECK_VALUE(key.size(-1) == query.size(-1), kContextCaller, ": query and key have other numbers of features", shapes);
  TORCH_CHECK_VALUE(key.sizes().slice(0, key.dim() - 1) == value.sizes().slice(0, value.dim() - 1), kContextCaller,
                    ": key and value differ in batch, heads or length", shapes);
  if (query.dim() == 2) return;
  TORCH_CHECK_VALUE(key.dim() < 4 || key.size(0) == query.size(0), kContextCaller, ": query and key differ in the batch", shapes);
  const auto heads = query.size(-3), key_heads = key.size(-3);
  TORCH_CHECK_VALUE(key_heads == heads || (query.dim() == 4 && key_heads > 0 && heads % key_heads == 0), kContextCaller, ": ",
                    heads, " heads are no multiple of ", key_heads, " key heads", shapes);
}

/// The numbers of ranks over which Ulysses may divide heads.
std::string ranks_that_fit(int64_t heads, int64_t key_heads) {
  std::vector<int64_t> fit;
  for (int64_t ranks = 1; ranks <= std::gcd(heads, key_heads); ++ranks) {
    if (heads % ranks == 0 && key_heads % ranks == 0) fit.push_back(ranks);
  }
  return c10::Join(", ", fit);
}

void check_heads(const AttentionCall& call, int64_t heads, int64_t key_heads) {
  if (call.scheme != ContextParallel::kUlysses) return;
  TORCH_CHECK_VALUE(heads % call.ranks() == 0 && key_heads % call.ranks() == 0, kContextCaller, " (ulysses): ", heads,
                    " heads and ", key_heads, " key heads do not divide over ", call.ranks(),
                    " ranks; numbers of ranks that fit: ", ranks_that_fit(heads, key_heads),
                    ". The other schemes divide no heads");
}

void check_documents(const AttentionCall& call) {
  const auto& documents = call.documents;
  if (documents.empty()) return;
  const auto length = call.queries.length_without_padding();
  const bool rises = std::is_sorted(documents.begin(), documents.end());
  TORCH_CHECK_VALUE(rises && documents.front() == 0 && documents.back() == length, kContextCaller, ": cu_seqlens are ",
                    c10::IntArrayRef(documents), "; they rise from 0 to the length of the sequence, ", length);
}

void check_lengths(const AttentionCall& call) {
  check_divides(call.queries, kContextCaller);
  check_divides(call.keys, kContextCaller);
  const bool is_alike = call.queries.length == call.keys.length && call.queries.layout == call.keys.layout;
  TORCH_CHECK_VALUE(is_alike || (!call.is_causal && call.documents.empty()), kContextCaller, ": ", call.queries.length,
                    " queries and ", call.keys.length, " keys; with is_causal and with cu_seqlens they are of one sequence");
  check_documents(call);
}

/// This rank's part of batch and heads, which other dims of the mesh may split.
struct BatchAndHeads {
  std::array<int64_t, 2> sizes, offsets, local_sizes;
};

/// The part of a mask that is of this rank's batch and heads, in 4 dims; an error unless the mask fits.
at::Tensor fitting_mask(const at::Tensor& given, const AttentionCall& call, const BatchAndHeads& place, int64_t dims) {
  TORCH_CHECK_VALUE(given.scalar_type() == at::kBool || given.is_floating_point(), kContextCaller, ": a mask of ",
                    given.scalar_type(), "; it is bool or floating-point");
  TORCH_CHECK_NOT_IMPLEMENTED(!given.requires_grad(), kContextCaller, ": the mask requires a gradient, and gets none here");
  TORCH_CHECK_VALUE(!call.is_causal, kContextCaller,
                    ": a mask is given and is_causal set; put the causal mask into the given one");
  TORCH_CHECK_VALUE(call.documents.empty(), kContextCaller, ": a mask and cu_seqlens are given; put the documents into the mask");
  TORCH_CHECK_VALUE(given.dim() >= 2 && given.dim() <= dims, kContextCaller, ": a mask of shape ", given.sizes(),
                    " for queries of ", dims, " dims");
  auto mask = given;
  while (mask.dim() < dims) mask = mask.unsqueeze(0);
  mask = with_four_dims(mask);
  const auto fits = [](int64_t size, int64_t whole, int64_t without_padding) {
    return size == 1 || size == whole || size == without_padding;
  };
  const bool all_fit = fits(mask.size(0), place.sizes[0], place.sizes[0]) && fits(mask.size(1), place.sizes[1], place.sizes[1]) &&
                       fits(mask.size(2), call.queries.length, call.queries.length_without_padding()) &&
                       fits(mask.size(3), call.keys.length, call.keys.length_without_padding());
  TORCH_CHECK_VALUE(all_fit, kContextCaller, ": a mask of shape ", given.sizes(), " does not fit [", place.sizes[0], ", ",
                    place.sizes[1], ", ", call.queries.length, ", ", call.keys.length,
                    "], batch, heads, and the lengths of the whole sequences; it is the whole mask, the same on every rank");
  for (int64_t dim = 0; dim < 2; ++dim) {
    const auto i = static_cast<size_t>(dim);
    if (mask.size(dim) > 1) mask = mask.narrow(dim, place.offsets[i], place.local_sizes[i]);
  }
  return mask;
}

/// A call without lengths and mask.
AttentionCallPtr start_call(const CommunicatorPtr& communicator, const ContextAttentionOptions& options,
                            const at::Tensor& query) {
  auto call = c10::make_intrusive<AttentionCall>();
  call->communicator = communicator;
  call->scheme = options.scheme;
  call->is_causal = options.is_causal;
  call->documents = options.cu_seqlens;
  call->scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  return call;
}

/// Runs the call on parts.
at::Tensor run_on_parts(const AttentionCallPtr& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto q = with_four_dims(query).contiguous(), k = with_four_dims(key).contiguous(), v = with_four_dims(value).contiguous();
  check_heads(*call, q.size(1), k.size(1));
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  return SplitAttention::apply(q, k, v, call).view(sizes);
}

/// The mesh dim over which a DTensor's sequence is split: that of `split_sequence`, or the first other.
std::optional<PartDim> split_dim(const Spec& spec) {
  const auto is_split = [&](int64_t dim) {
    const auto* shard = std::get_if<Shard>(&spec.placements()[static_cast<size_t>(dim)]);
    return shard && shard->dim == spec.dim() - 2;
  };
  const auto named = part_dim(spec.mesh());
  if (named && is_split(named->dim)) return named;
  for (int64_t dim = 0; dim < spec.mesh().ndim(); ++dim) {
    if (is_split(dim)) return PartDim{dim, {}};
  }
  return std::nullopt;
}

std::string describe(const Spec& query, const Spec& key, const Spec& value) {
  return c10::str("; query: ", query.to_string(), ", key: ", key.to_string(), ", value: ", value.to_string());
}

PartDim check_placements(const Spec& query, const Spec& key, const Spec& value) {
  const auto split = split_dim(query), key_split = split_dim(key);
  const auto specs = describe(query, key, value);
  const bool is_alike = query.placements() == key.placements() && key.placements() == value.placements() &&
                        query.mesh().rank_list() == key.mesh().rank_list() && query.mesh().shape() == key.mesh().shape() &&
                        key.mesh() == value.mesh();
  TORCH_CHECK_VALUE(split && key_split && is_alike, kContextCaller, ": query, key and value must lie alike, Shard(",
                    query.dim() - 2, ") over the ranks that split the sequence", specs);
  for (size_t dim = 0; dim < query.placements().size(); ++dim) {
    const auto* shard = std::get_if<Shard>(&query.placements()[dim]);
    const bool is_other = static_cast<int64_t>(dim) != split->dim;
    TORCH_CHECK_VALUE(!is_other || is_replicate(query.placements()[dim]) || (shard && shard->dim < query.dim() - 2),
                      kContextCaller, ": other dims of the mesh may split batch and heads alone", specs);
  }
  return *split;
}

/// A mask on every rank, in the order of the positions. One that is split along queries or keys lies as these do.
at::Tensor whole_mask(const at::Tensor& mask) {
  if (!is_dtensor(mask)) return mask;
  TORCH_CHECK_NOT_IMPLEMENTED(!mask.requires_grad(), kContextCaller, ": the mask requires a gradient, and gets none here");
  const auto& spec = DTensor(mask).spec();
  const auto part = part_dim(spec.mesh());
  auto whole = DTensor(mask).full_tensor();
  const auto* shard = part ? std::get_if<Shard>(&spec.placements()[static_cast<size_t>(part->dim)]) : nullptr;
  if (!shard || shard->dim < mask.dim() - 2) return whole;
  const SplitSequence sequence{part->layout, mask.size(shard->dim), spec.mesh().size(part->dim)};
  check_divides(sequence, kContextCaller);
  return whole_of(whole.chunk(sequence.ranks, shard->dim), shard->dim, sequence);
}

BatchAndHeads place_of(const Spec& spec) {
  BatchAndHeads place{{1, 1}, {0, 0}, {1, 1}};
  for (int64_t dim = 0; dim + 2 < spec.dim(); ++dim) {
    const auto from = static_cast<size_t>(dim);
    place.sizes[from] = spec.sizes()[from];
    place.offsets[from] = spec.local_offsets()[from];
    place.local_sizes[from] = spec.local_sizes()[from];
  }
  return place;
}

at::Tensor attend_dtensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const ContextAttentionOptions& options) {
  for (const auto* tensor : {&query, &key, &value})
    TORCH_CHECK_VALUE(is_dtensor(*tensor), kContextCaller,
                      ": query, key and value are DTensors; of plain tensors, each rank's part, it takes the mesh as well");
  check_shapes(query, key, value);
  const auto &spec = DTensor(query).spec(), &key_spec = DTensor(key).spec();
  const auto split = check_placements(spec, key_spec, DTensor(value).spec());
  const auto call = start_call(spec.mesh().communicator(split.dim), options, query);
  call->queries = {split.layout, query.size(-2), call->ranks()};
  call->keys = {split_dim(key_spec)->layout, key.size(-2), call->ranks()};
  check_lengths(*call);
  if (options.mask) call->mask = fitting_mask(whole_mask(*options.mask), *call, place_of(spec), query.dim());
  const auto out = run_on_parts(call, to_local(query), to_local(key), to_local(value));
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  return from_local(out, spec.mesh(), spec.placements(), sizes);
}

/// Attention of each rank's part of batch and heads, `place`, and of the sequence.
at::Tensor attend_local(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const DeviceMesh& mesh,
                        const ContextAttentionOptions& options, const BatchAndHeads& place) {
  const auto named = part_dim(mesh);
  const auto layout = named ? named->layout : PartLayout{};
  const auto call = start_call(mesh.communicator(0), options, query);
  call->queries = {layout, query.size(-2) * call->ranks(), call->ranks()};
  call->keys = {layout, key.size(-2) * call->ranks(), call->ranks()};
  check_lengths(*call);
  if (options.mask) call->mask = fitting_mask(whole_mask(*options.mask), *call, place, query.dim());
  return run_on_parts(call, query, key, value);
}

at::Tensor attend_parts(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const DeviceMesh& mesh,
                        const ContextAttentionOptions& options) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, kContextCaller, ": a mesh of one dim is needed, such as mesh[\"cp\"], not ",
                    mesh.to_string());
  check_shapes(query, key, value);
  if (is_dtensor(query) || is_dtensor(key) || is_dtensor(value)) {
    const auto split = spread_alike(query, key, value, mesh);
    const auto& spec = DTensor(split.query).spec();
    const auto out =
        attend_local(to_local(split.query), to_local(split.key), to_local(split.value), mesh, options, place_of(spec));
    auto sizes = query.sizes().vec();
    sizes.back() = value.size(-1);
    return from_local(out, spec.mesh(), spec.placements(), sizes);
  }
  BatchAndHeads place{{1, 1}, {0, 0}, {1, 1}};
  for (int64_t dim = 0; dim + 2 < query.dim(); ++dim)
    place.sizes[static_cast<size_t>(dim)] = place.local_sizes[static_cast<size_t>(dim)] = query.size(dim);
  return attend_local(query, key, value, mesh, options, place);
}

} // namespace

} // namespace internal

const char* to_string(ContextParallel scheme) {
  switch (scheme) {
    case ContextParallel::kAllGather: return "all-gather";
    case ContextParallel::kRing: return "ring";
    case ContextParallel::kUlysses: return "ulysses";
  }
  return "unknown";
}

at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const ContextAttentionOptions& options) {
  return internal::attend_dtensors(query, key, value, options);
}

at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const DeviceMesh& mesh, const ContextAttentionOptions& options) {
  return internal::attend_parts(query, key, value, mesh, options);
}

ContextParallelScope::ContextParallelScope(ContextParallel scheme) : ContextParallelScope(scheme, DeviceMesh()) {}

ContextParallelScope::ContextParallelScope(ContextParallel scheme, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(!mesh.defined() || mesh.ndim() == 1,
                    "ContextParallelScope: a mesh of one dim is needed, such as mesh[\"cp\"], not ",
                    mesh.defined() ? mesh.to_string() : "");
  before_ = std::exchange(internal::open_runs->carried, std::make_shared<internal::ContextScope>(scheme, mesh));
}

ContextParallelScope::~ContextParallelScope() { internal::open_runs->carried = std::move(before_); }

} // namespace tessera
