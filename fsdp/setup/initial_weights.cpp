#include <tessera/fsdp/setup/initial_weights.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

namespace {

std::string describe(const at::Tensor& tensor, const std::string& name) {
  const char* frozen = tensor.requires_grad() || !at::isFloatingType(tensor.scalar_type()) ? "" : ", frozen";
  const auto own = own_strides(tensor);
  const auto strides = own.empty() ? "" : fmt::format(", strides [{}]", fmt::join(own, ", "));
  return fmt::format("{} {}[{}]{}{}\n", name, c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), strides,
                     frozen);
}

std::string describe(const std::vector<std::pair<std::string, at::Tensor>>& buffers) {
  std::string text;
  for (const auto& [name, buffer] : buffers)
    text += fmt::format("the buffer {} {}[{}]{}\n", name, c10::toString(buffer.scalar_type()), fmt::join(buffer.sizes(), ", "),
                        buffer.is_meta() ? " on the meta device" : "");
  return text;
}

/// This hash is the same on every rank, unlike std::hash.
int64_t fingerprint(const std::string& text) { return static_cast<int64_t>(XXH3_64bits(text.data(), text.size())); }

/// A checksum of the bytes, in the order of the elements.
int64_t value_checksum(const at::Tensor& tensor) {
  const auto values = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu();
  return static_cast<int64_t>(XXH3_64bits(values.const_data_ptr(), values.nbytes()));
}

/// Every rank's `values`, [ranks × values].
at::Tensor gather(const std::vector<int64_t>& values, Communicator& communicator, const DeviceMesh& mesh,
                  const std::string& label) {
  const auto options = at::TensorOptions(at::kLong);
  const auto count = static_cast<int64_t>(values.size());
  const auto mine = at::from_blob(const_cast<int64_t*>(values.data()), {count}, options).to(mesh.device()).clone();
  auto all = at::empty({communicator.size() * count}, options.device(mesh.device()));
  communicator.all_gather_into(all, mine, label).wait();
  return all.cpu().view({communicator.size(), count});
}

struct Agreed {
  bool is_same;    ///< every rank has the same values
  int64_t largest; ///< of the ranks' numbers
};

/// In one all-reduce, of which the size does not depend on the number of ranks: of the values and their complements, since the
/// largest complement is that of the smallest value.
Agreed agree_on(const std::vector<int64_t>& values, int64_t number, Communicator& communicator, const DeviceMesh& mesh,
                const std::string& label) {
  auto asked = values;
  for (const auto value : values) asked.push_back(~value);
  asked.push_back(number);
  const auto count = static_cast<int64_t>(asked.size());
  auto extremes = at::from_blob(asked.data(), {count}, at::TensorOptions(at::kLong)).to(mesh.device()).clone();
  communicator.all_reduce(extremes, ReduceOp::kMax, label).wait();
  if (extremes.is_meta()) return {true, number}; // of ranks that are only pretended
  const auto all = extremes.cpu();
  const auto* largest = all.const_data_ptr<int64_t>();
  bool is_same = true;
  for (size_t i = 0; i < values.size(); ++i) is_same = is_same && largest[i] == ~largest[values.size() + i];
  return {is_same, largest[count - 1]};
}

/// Overwrites `tensor` with rank 0's values.
void broadcast(const at::Tensor& tensor, const std::string& name, Communicator& communicator, const DeviceMesh& mesh) {
  const auto values = tensor.detach().resolve_conj().resolve_neg().to(mesh.device()).contiguous();
  communicator.broadcast(values, 0, name).wait();
  if (at::has_internal_overlap(tensor) == at::MemOverlap::No) {
    tensor.detach().copy_(values);
  } else {
    tensor.set_data(values.to(tensor.device())); // an expanded buffer
  }
}

void broadcast(const InitialWeightsCheck& check, Communicator& communicator) {
  for (const auto& [name, buffer] : check.buffers) {
    if (!buffer.is_meta()) broadcast(buffer, name, communicator, check.mesh);
  }
  if (!check.tensors.empty() && check.tensors[0].is_meta()) return;
  for (size_t i = 0; i < check.tensors.size(); ++i) broadcast(check.tensors[i], check.names[i], communicator, check.mesh);
}

/// `checksums` are those of every rank, [ranks × parameters].
void check_same_values(const at::Tensor& checksums, const std::vector<std::string>& names, const std::vector<int64_t>& ranks,
                       const std::string& call) {
  for (int64_t i = 0; i < static_cast<int64_t>(names.size()); ++i) {
    std::vector<int64_t> differing;
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      if (checksums[static_cast<int64_t>(rank)][i].item<int64_t>() != checksums[0][i].item<int64_t>())
        differing.push_back(ranks[rank]);
    }
    TORCH_CHECK_VALUE(
        differing.empty(), call, ": the initial values of ", names[static_cast<size_t>(i)], " on rank(s) ",
        fmt::format("{}", fmt::join(differing, ", ")), " differ from those on rank ", ranks[0],
        "; build the model from the same seed on every rank, or set FullyShardOptions::initial_weights to kBroadcast");
  }
}

} // namespace

WeightAgreement agree_on_initial_weights(const InitialWeightsCheck& check) {
  const auto& tensors = check.tensors;
  const auto& mesh = check.mesh;
  const auto& call = check.call;
  if (mesh.size() == 1) return {};
  const at::NoGradGuard no_grad;
  const auto communicator = mesh.flatten().communicator();
  std::string structure = check.options + "\n";
  for (size_t i = 0; i < tensors.size(); ++i) structure += describe(tensors[i], check.names[i]);
  const bool broadcasts = check.mode == InitialWeights::kBroadcast;
  if (broadcasts) structure += describe(check.buffers);
  const auto [is_same, largest] = agree_on({fingerprint(structure)}, check.model_number, *communicator, mesh, call);
  if (!is_same) {
    const auto texts = gather_texts(structure, *communicator, mesh.device(), call);
    TORCH_CHECK_VALUE(false, call,
                      ": the ranks' models or options differ: ", first_difference(texts, communicator->ranks(), "parameter"));
  }
  WeightAgreement agreement{.model_number = largest};
  if (broadcasts) broadcast(check, *communicator);
  if (tensors.empty() || tensors[0].is_meta() || check.mode == InitialWeights::kUnchecked) return agreement;
  std::vector<int64_t> checksums;
  for (const auto& tensor : tensors) checksums.push_back(value_checksum(tensor));
  agreement.checksum = fingerprint(fmt::format("{}", fmt::join(checksums, " ")));
  if (broadcasts) return agreement;
  if (agree_on(checksums, 0, *communicator, mesh, call).is_same) return agreement;
  check_same_values(gather(checksums, *communicator, mesh, call), check.names, communicator->ranks(), call);
  return agreement;
}

} // namespace tessera::internal
