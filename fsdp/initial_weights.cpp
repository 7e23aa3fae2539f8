#include <tessera/fsdp/initial_weights.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <cstring>

namespace tessera::fsdp_internal {

namespace {

std::string describe(const at::Tensor& tensor, const std::string& name) {
  const char* frozen = tensor.requires_grad() || !at::isFloatingType(tensor.scalar_type()) ? "" : ", frozen";
  return fmt::format("{} {}[{}]{}\n", name, c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), frozen);
}

/// The same on every rank, unlike std::hash.
int64_t fingerprint(const std::string& text) { return static_cast<int64_t>(XXH3_64bits(text.data(), text.size())); }

/// Of the bytes, in the order of the elements.
int64_t checksum(const at::Tensor& tensor) {
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

std::vector<std::string> gather_text(const std::string& text, Communicator& communicator, const DeviceMesh& mesh,
                                     const std::string& label) {
  const auto lengths = gather({static_cast<int64_t>(text.size())}, communicator, mesh, label);
  const auto longest = static_cast<size_t>(lengths.max().item<int64_t>());
  std::vector<int64_t> words(longest / sizeof(int64_t) + 1);
  std::memcpy(words.data(), text.data(), text.size());
  const auto all = gather(words, communicator, mesh, label);
  std::vector<std::string> texts;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    texts.emplace_back(reinterpret_cast<const char*>(all[rank].const_data_ptr<int64_t>()),
                       static_cast<size_t>(lengths[rank].item<int64_t>()));
  }
  return texts;
}

/// The first line at which the texts differ from the first one: "rank 2 has …, rank 0 has …".
std::string first_difference(const std::vector<std::string>& texts, const std::vector<int64_t>& ranks) {
  for (size_t other = 1; other < texts.size(); ++other) {
    if (texts[other] == texts[0]) continue;
    size_t line = 0, position = 0;
    const auto& a = texts[0];
    const auto& b = texts[other];
    for (; position < std::min(a.size(), b.size()) && a[position] == b[position]; ++position) {
      if (a[position] == '\n') line = position + 1;
    }
    const auto at = [&](const std::string& text) {
      return line < text.size() ? text.substr(line, text.find('\n', line) - line) : std::string("no further parameter");
    };
    return fmt::format("rank {} has {}, rank {} has {}", ranks[0], at(a), ranks[other], at(b));
  }
  return "";
}

} // namespace

Agreement agree_on_initial_weights(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
                                   const DeviceMesh& mesh, InitialWeights mode, const std::string& module,
                                   const std::string& options, int64_t model_number) {
  if (mesh.size() == 1) return {};
  const at::NoGradGuard no_grad;
  const auto communicator = mesh.ndim() == 1 ? mesh.communicator(0) : mesh.flatten().communicator(0);
  const std::string label = "fully_shard of " + module;

  std::string structure = options + "\n";
  for (size_t i = 0; i < tensors.size(); ++i) structure += describe(tensors[i], names[i]);
  const auto gathered = gather({fingerprint(structure), model_number}, *communicator, mesh, label);
  const auto fingerprints = gathered.select(1, 0);
  if (!fingerprints.eq(fingerprints[0]).all().item<bool>()) {
    const auto texts = gather_text(structure, *communicator, mesh, label);
    TORCH_CHECK_VALUE(false, "fully_shard of ", module,
                      ": the ranks' models or options differ: ", first_difference(texts, communicator->ranks()));
  }
  Agreement agreement{.model_number = gathered[0][1].item<int64_t>()};
  if (tensors.empty() || tensors[0].is_meta() || mode == InitialWeights::kUnchecked) return agreement;
  if (mode == InitialWeights::kBroadcast) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto buffer = tensors[i].detach().to(mesh.device()).contiguous();
      communicator->broadcast(buffer, 0, names[i]).wait();
      tensors[i].detach().copy_(buffer);
    }
  }
  std::vector<int64_t> checksums;
  for (const auto& tensor : tensors) checksums.push_back(checksum(tensor));
  agreement.checksum = fingerprint(fmt::format("{}", fmt::join(checksums, " ")));
  if (mode == InitialWeights::kBroadcast) return agreement;
  const auto all = gather(checksums, *communicator, mesh, label);
  for (int64_t i = 0; i < static_cast<int64_t>(tensors.size()); ++i) {
    std::vector<int64_t> differing;
    for (int rank = 1; rank < communicator->size(); ++rank) {
      if (all[rank][i].item<int64_t>() != all[0][i].item<int64_t>())
        differing.push_back(communicator->ranks()[static_cast<size_t>(rank)]);
    }
    TORCH_CHECK_VALUE(
        differing.empty(), "fully_shard of ", module, ": the initial values of ", names[static_cast<size_t>(i)], " on rank(s) ",
        fmt::format("{}", fmt::join(differing, ", ")), " differ from those on rank ", communicator->ranks()[0],
        "; build the model from the same seed on every rank, or set FullyShardOptions::initial_weights to kBroadcast");
  }
  return agreement;
}

} // namespace tessera::fsdp_internal
