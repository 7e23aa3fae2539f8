#include <tessera/parallel/split_sequence.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include <tessera/parallel/context/sequence_parts.h>

namespace tessera {

namespace internal {

namespace {

constexpr const char* kSplit = "split_sequence";

/// A number that the values of two tensors of one shape seldom share: each element's bits, weighed by its place.
int64_t checksum(const at::Tensor& tensor) {
  auto values = tensor.is_complex() ? at::view_as_real(tensor.contiguous()) : tensor.contiguous();
  if (values.is_floating_point()) {
    const auto bytes = values.element_size();
    values = values.view(bytes == 8 ? at::kLong : bytes == 4 ? at::kInt : bytes == 2 ? at::kShort : at::kChar);
  }
  const auto bits = values.reshape({-1}).to(at::kLong);
  constexpr int64_t kOdd = 0x61c8864680b583eb; // spreads the weights over all bits
  return (bits * (at::arange(bits.numel(), bits.options()).add_(1).mul_(kOdd))).sum().item<int64_t>();
}

constexpr int64_t kNumbersATensor = 3;

/// What the ranks compare of a tensor: its sequence's length, its shape, its values.
std::vector<int64_t> numbers_of(const at::Tensor& tensor, int64_t dim, bool compares_values) {
  auto shape = static_cast<uint64_t>(tensor.scalar_type()); // a hash that is the same in every process, as Abseil's is not
  for (const auto size : tensor.sizes()) shape = (shape ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15;
  return {tensor.dim() > 0 ? tensor.size(dim) : 1, static_cast<int64_t>(shape), compares_values ? checksum(tensor) : 0};
}

void compare_ranks(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& dims, const DeviceMesh& mesh,
                   bool compares_values, const char* caller) {
  const at::NoGradGuard no_grad;
  const auto communicator = mesh.communicator(0);
  if (communicator->size() == 1) return;
  std::vector<int64_t> mine;
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto numbers = numbers_of(batch[i], dims[i], compares_values);
    mine.insert(mine.end(), numbers.begin(), numbers.end());
  }
  const auto options = at::TensorOptions(at::kLong).device(mesh.device());
  auto all = at::empty({communicator->size(), static_cast<int64_t>(mine.size())}, options);
  communicator->all_gather_into(all.view({-1}), at::tensor(mine, at::kLong).to(mesh.device()), caller).wait();
  if (all.is_meta()) return; // where no rank has values
  all = all.cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  for (int64_t rank = 1; rank < communicator->size(); ++rank) {
    for (size_t i = 0; i < mine.size(); ++i) {
      const auto here = numbers[static_cast<size_t>(rank) * mine.size() + i], first = numbers[i];
      if (here == first) continue;
      const auto tensor = i / kNumbersATensor, what = i % kNumbersATensor;
      const auto others =
          c10::str(caller, ": tensor ", tensor, " of the batch of rank ", communicator->ranks()[static_cast<size_t>(rank)]);
      const auto first_rank = communicator->ranks()[0];
      TORCH_CHECK_VALUE(what != 0, others, " has a sequence of ", here, ", that of rank ", first_rank, " one of ", first);
      TORCH_CHECK_VALUE(
          false, others, " has ", what == 1 ? "another shape or dtype" : "other values", " than that of rank ", first_rank,
          "; the ranks that split sequences or layers take the same rows: seed the loader by the data-parallel index");
    }
  }
}

/// A tensor with `count` times `value` behind it along a dim.
at::Tensor padded_with(const at::Tensor& tensor, int64_t dim, int64_t count, const at::Scalar& value) {
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = count;
  return at::cat({tensor, at::full(sizes, value, tensor.options())}, dim);
}

/// Splits whole tensors without padding.
class Splitter {
 public:
  Splitter(const DeviceMesh& mesh, const SplitSequence& sequence)
      : sequence_(sequence),
        mesh_(mesh.flatten(name_with(mesh.dim_names().empty() ? "" : mesh.dim_names()[0], sequence.layout))) {}

  const DeviceMesh& mesh() const { return mesh_; }
  DTensor operator()(const at::Tensor& tensor, int64_t dim, const at::Scalar& pad_value) const {
    const auto whole = padded_with(tensor.to(mesh_.device()), dim, sequence_.layout.padding, pad_value);
    const auto part = part_of(whole, dim, sequence_, mesh_.local_rank(0));
    return from_local(part, mesh_, {Shard{dim}}, whole.sizes().vec());
  }

 private:
  SplitSequence sequence_;
  DeviceMesh mesh_;
};

/// The dims that are sequences, not negative, of tensors that fit each other.
std::vector<int64_t> check_batch(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& dims, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, kSplit, ": a mesh of one dim is needed, such as mesh[\"cp\"], not ", mesh.to_string());
  TORCH_CHECK_VALUE(!batch.empty() && batch.size() == dims.size(), kSplit, ": ", batch.size(), " tensors and ", dims.size(),
                    " dims are given; it takes at least one tensor, and a dim for each");
  std::vector<int64_t> result;
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& tensor = batch[i];
    TORCH_CHECK_VALUE(tensor.defined() && !is_dtensor(tensor), kSplit, ": tensor ", i, " of the batch is ",
                      tensor.defined() ? "a DTensor" : "undefined", "; it takes whole, plain tensors");
    TORCH_CHECK_VALUE(
        !tensor.requires_grad(), kSplit, ": tensor ", i,
        " of the batch requires a gradient, of which this rank would have its part alone; split before the embedding");
    const auto dim = dims[i] < 0 ? dims[i] + tensor.dim() : dims[i];
    TORCH_CHECK_VALUE(dim >= 0 && dim < tensor.dim(), kSplit, ": tensor ", i, " of the batch has no dim ", dims[i], ", it has ",
                      tensor.dim(), " dims");
    result.push_back(dim);
  }
  return result;
}

void check_one_length(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& dims) {
  for (size_t i = 1; i < batch.size(); ++i)
    TORCH_CHECK_VALUE(batch[i].size(dims[i]) == batch[0].size(dims[0]), kSplit, ": tensor ", i,
                      " of the batch has a sequence of ", batch[i].size(dims[i]), ", and tensor 0 one of ",
                      batch[0].size(dims[0]));
}

/// The split of a sequence of `length`, padded where the options allow it.
SplitSequence split_of(int64_t length, int64_t ranks, const SequenceSplitOptions& options) {
  const auto divisor = divisor_of(options.order, ranks);
  if (!options.pads) check_divides({{options.order, 0}, length, ranks}, kSplit);
  const auto padding = (divisor - length % divisor) % divisor;
  return {{options.order, padding}, length + padding, ranks};
}

/// The next element of each.
at::Tensor labels_of(const at::Tensor& tokens, int64_t dim, int64_t ignore_index) {
  TORCH_CHECK_VALUE(!tokens.is_floating_point() && !tokens.is_complex(), kSplit, ": labels of a tensor of ", tokens.scalar_type(),
                    "; they are of integers");
  const auto length = tokens.size(dim), shifted = std::min<int64_t>(length, 1);
  return padded_with(tokens.to(at::kLong).narrow(dim, shifted, length - shifted), dim, shifted, ignore_index);
}

SequenceParts split_batch(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& given_dims, const DeviceMesh& mesh,
                          const SequenceSplitOptions& options) {
  const auto dims = check_batch(batch, given_dims, mesh);
  compare_ranks(batch, dims, mesh, options.compares_values, kSplit);
  check_one_length(batch, dims);
  const auto length = batch[0].size(dims[0]);
  const auto sequence = split_of(length, mesh.size(0), options);
  const Splitter split(mesh, sequence);
  SequenceParts parts;
  parts.mesh = split.mesh();
  parts.length = sequence.length;
  for (size_t i = 0; i < batch.size(); ++i)
    parts.tensors.push_back(split(batch[i], dims[i], i < options.pad_values.size() ? options.pad_values[i] : at::Scalar(0)));
  parts.positions = split(at::arange(length, at::kLong), 0, 0);
  if (options.labels_of) {
    const auto i = *options.labels_of;
    TORCH_CHECK_VALUE(i < batch.size(), kSplit, ": labels_of is ", i, ", and the batch has ", batch.size(), " tensors");
    parts.labels = split(labels_of(batch[i], dims[i], options.ignore_index), dims[i], options.ignore_index);
  }
  return parts;
}

at::Tensor merge_parts(const at::Tensor& tensor, int64_t given_dim) {
  TORCH_CHECK_VALUE(is_dtensor(tensor), "merge_sequence: the tensor is plain");
  const auto& spec = DTensor(tensor).spec();
  const auto dim = given_dim < 0 ? given_dim + tensor.dim() : given_dim;
  const auto part = part_dim(spec.mesh());
  const auto* shard = part ? std::get_if<Shard>(&spec.placements()[static_cast<size_t>(part->dim)]) : nullptr;
  TORCH_CHECK_VALUE(shard && shard->dim == dim, "merge_sequence: dim ", given_dim,
                    " was not split by split_sequence: ", spec.to_string());
  const SplitSequence sequence{part->layout, tensor.size(dim), spec.mesh().size(part->dim)};
  check_divides(sequence, "merge_sequence");
  const auto whole = whole_of(DTensor(tensor).full_tensor().chunk(sequence.ranks, dim), dim, sequence);
  return whole.narrow(dim, 0, sequence.length_without_padding());
}

} // namespace

} // namespace internal

SequenceParts split_sequence(const std::vector<at::Tensor>& batch, const std::vector<int64_t>& dims, const DeviceMesh& mesh,
                             const SequenceSplitOptions& options) {
  return internal::split_batch(batch, dims, mesh, options);
}

void check_same_batch(const std::vector<at::Tensor>& batch, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "check_same_batch: a mesh of one dim is needed, such as mesh[\"tp\"], not ",
                    mesh.to_string());
  internal::compare_ranks(batch, std::vector<int64_t>(batch.size(), -1), mesh, /*compares_values=*/true, "check_same_batch");
}

at::Tensor merge_sequence(const at::Tensor& tensor, int64_t dim) { return internal::merge_parts(tensor, dim); }

} // namespace tessera
