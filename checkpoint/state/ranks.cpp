#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <tessera/base/error_text.h>
#include <tessera/checkpoint/state/ranks.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera::internal {

std::string describe_ranks(const std::vector<int64_t>& ranks) {
  return c10::str(ranks.size() > 1 ? "ranks " : "rank ", c10::Join(", ", ranks));
}

Ranks::Ranks(const std::optional<DeviceMesh>& mesh, const std::string& purpose) {
  TORCH_CHECK(!mesh || mesh->defined(), "checkpoint: the mesh of the ranks that take part is undefined");
  TORCH_CHECK(!mesh || is_initialized(), "checkpoint: the mesh of the ranks that take part has outlived the process group");
  if (!is_initialized()) return;
  auto& context = process_context();
  members_.resize(static_cast<size_t>(context.world_size()));
  std::iota(members_.begin(), members_.end(), 0);
  if (mesh) members_ = mesh->ranks();
  std::ranges::sort(members_);
  const auto own = std::ranges::find(members_, static_cast<int64_t>(context.rank()));
  TORCH_CHECK(own != members_.end(), "checkpoint: rank ", context.rank(), " is not in ", mesh->to_string(),
              ", whose ranks alone take part");
  rank_ = static_cast<int>(own - members_.begin());
  size_ = static_cast<int>(members_.size());
  if (size_ == 1) return;
  try {
    communicator_ = context.communicator(members_, at::kCPU, purpose);
  } catch (c10::Error& error) {
    error.add_context("checkpoint: " + describe_ranks(members_) + " must each call what saves or loads");
    throw;
  }
}

void Ranks::check_hold_all(const std::string& name, const at::Tensor& tensor) const {
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !is_initialized() || size_ == process_context().world_size()) return;
  for (const auto rank : meta->spec->mesh().ranks()) {
    TORCH_CHECK(std::ranges::binary_search(members_, rank), "tensor \"", name, "\" lies on ", meta->spec->mesh().to_string(),
                ", and rank ", rank, " does not take part");
  }
}

Ranks Ranks::unshared(const std::optional<DeviceMesh>& mesh, const std::string& purpose) {
  for (int number = 1;; ++number) {
    Ranks ranks(mesh, number == 1 ? purpose : purpose + " " + std::to_string(number));
    // The process context holds one reference and `ranks` the other.
    if (!ranks.communicator_ || ranks.communicator_.use_count() == 2) return ranks;
  }
}

std::vector<std::string> Ranks::all(const std::string& step, const std::function<std::string()>& work) const {
  auto mine = std::to_string(step.size()) + ":" + step;
  try {
    mine += "+" + work();
  } catch (...) {
    mine += "-" + error_text(std::current_exception());
  }
  std::vector<std::string> steps, failures, results;
  for (const auto& message : gather(mine, step)) {
    const auto begin = message.find(':') + 1, end = begin + std::stoul(message);
    steps.push_back(message.substr(begin, end - begin));
    const auto text = message.substr(end + 1);
    failures.push_back(message[end] == '-' ? text : "");
    results.push_back(text);
  }
  TORCH_CHECK(std::ranges::all_of(steps, [&](const auto& other) { return other == step; }),
              "checkpoint: the ranks do not call the same, which they must:\n", by_ranks(steps),
              "\nSaveOptions::mesh and LoadOptions::mesh let the ranks of one mesh save and load without the others");
  const auto causes = by_ranks(failures);
  TORCH_CHECK(causes.empty(), "checkpoint: cannot ", step, ": ", causes);
  return results;
}

size_t Ranks::position_of(int64_t rank_of_job) const {
  const auto found = std::ranges::lower_bound(members_, rank_of_job);
  TORCH_CHECK(found != members_.end() && *found == rank_of_job, "checkpoint: rank ", rank_of_job, " does not take part");
  return static_cast<size_t>(found - members_.begin());
}

std::string Ranks::by_ranks(const std::vector<std::string>& texts) const {
  std::vector<std::pair<std::string, std::vector<int64_t>>> groups;
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) continue;
    const auto known = std::ranges::find(groups, texts[i], [](const auto& group) { return group.first; });
    auto& group = known == groups.end() ? groups.emplace_back(texts[i], std::vector<int64_t>()) : *known;
    group.second.push_back(members_[i]);
  }
  std::vector<std::string> lines;
  for (const auto& [text, ranks] : groups) {
    const bool all = size_ > 1 && ranks.size() == members_.size();
    lines.push_back((all ? c10::str("all ", size_, " ranks") : describe_ranks(ranks)) + ": " + text);
  }
  return c10::Join("\n", lines);
}

void Ranks::broadcast(const at::Tensor& tensor, const std::string& label) const {
  if (size_ == 1 || tensor.numel() == 0) return;
  communicator_->broadcast(tensor.view({-1}).view(at::kByte), 0, label).wait(); // gloo does not know every dtype
}

void Ranks::sum(const at::Tensor& tensor, const std::string& label) const {
  if (size_ == 1 || tensor.numel() == 0) return;
  communicator_->all_reduce(tensor.view({-1}), ReduceOp::kSum, label).wait();
}

// The label is the same whatever the ranks do: collectives with different ones would end the group.
std::vector<std::string> Ranks::gather(const std::string& mine, const std::string& step) const {
  if (size_ == 1) return {mine};
  try {
    return gather_texts(mine, *communicator_, at::kCPU, "checkpoint");
  } catch (c10::Error& error) {
    error.add_context("checkpoint: cannot " + step + ", which " + describe_ranks(members_) + " must each call");
    throw;
  }
}

} // namespace tessera::internal
