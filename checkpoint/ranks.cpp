#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <tessera/checkpoint/ranks.h>
#include <tessera/collectives/process_context.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tessera::checkpoint {

Ranks::Ranks(const std::string& purpose) {
  if (!is_initialized()) return;
  auto& context = process_context();
  rank_ = context.rank();
  size_ = context.world_size();
  if (size_ == 1) return;
  std::vector<int64_t> world(static_cast<size_t>(size_));
  std::iota(world.begin(), world.end(), 0);
  communicator_ = context.communicator(world, at::kCPU, purpose);
}

Ranks Ranks::unshared(const std::string& purpose) {
  for (int number = 1;; ++number) {
    Ranks ranks(number == 1 ? purpose : purpose + " " + std::to_string(number));
    // The process context holds one reference and `ranks` the other.
    if (!ranks.communicator_ || ranks.communicator_.use_count() == 2) return ranks;
  }
}

std::vector<std::string> Ranks::all(const std::string& step, const std::function<std::string()>& work) const {
  std::string mine;
  try {
    mine = "+" + work();
  } catch (const c10::Error& error) {
    mine = "-" + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    mine = "-" + std::string(error.what());
  }
  auto results = gather(mine, "checkpoint: " + step);
  std::string failures;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& result = results[rank];
    if (result[0] == '-') failures += (failures.empty() ? "" : "\n") + ("rank " + std::to_string(rank)) + ": " + result.substr(1);
  }
  TORCH_CHECK(failures.empty(), "checkpoint: cannot ", step, ": ", failures);
  for (auto& result : results) result.erase(0, 1);
  return results;
}

void Ranks::broadcast(const at::Tensor& tensor, const std::string& label) const {
  if (size_ == 1 || tensor.numel() == 0) return;
  communicator_->broadcast(tensor.view({-1}).view(at::kByte), 0, label).wait(); // gloo does not know every dtype
}

std::vector<std::string> Ranks::gather(const std::string& mine, const std::string& label) const {
  if (size_ == 1) return {mine};
  auto lengths = at::empty({size_}, at::kLong), length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(mine.size());
  communicator_->all_gather_into(lengths, length, label).wait();
  const auto* sizes = lengths.const_data_ptr<int64_t>();
  const auto longest = *std::max_element(sizes, sizes + size_);
  auto texts = at::empty({size_ * longest}, at::kByte), text = at::zeros({longest}, at::kByte);
  std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  communicator_->all_gather_into(texts, text, label).wait();
  std::vector<std::string> results;
  for (int rank = 0; rank < size_; ++rank) {
    results.emplace_back(static_cast<const char*>(texts.const_data_ptr()) + rank * longest, static_cast<size_t>(sizes[rank]));
  }
  return results;
}

} // namespace tessera::checkpoint
