#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/base/listing.h>
#include <tessera/checkpoint/save/settle_differences.h>
#include <tessera/checkpoint/state/compare_ranks.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>

namespace tessera::internal {

namespace {

// A tensor of which not all holders have the same values.
struct Differing {
  size_t position; // in the plan
  std::vector<int> ranks;
};

ComparedTensors plain_tensors_of(const Snapshot& snapshot) {
  ComparedTensors tensors;
  for (size_t i = 0; i < snapshot.data.size(); ++i) {
    const auto& held = snapshot.state.tensors[i];
    if (held.mesh.empty() && !snapshot.data[i].empty()) tensors.emplace_back(held.name, snapshot.data[i][0]);
  }
  return tensors;
}

std::vector<Differing> find_differing(const Ranks& ranks, const Snapshot& snapshot, const SavePlan& plan) {
  const auto differences = compare_ranks(ranks, [&] { return plain_tensors_of(snapshot); });
  std::vector<Differing> differing;
  for (size_t position = 0; position < plan.tensors.size(); ++position) {
    const auto found = differences.find(plan.tensors[position].what.name);
    if (found != differences.end()) differing.push_back({position, found->second.ranks});
  }
  return differing;
}

std::vector<std::string> names_of(const std::vector<Differing>& differing, const SavePlan& plan) {
  std::vector<std::string> names;
  for (const auto& tensor : differing) names.push_back(plan.tensors[tensor.position].what.name);
  return names;
}

// This rank's memory of a plain tensor; null where it has none.
at::Tensor* data_of(Snapshot& snapshot, const std::string& name) {
  auto& tensors = snapshot.state.tensors;
  const auto found = std::ranges::find(tensors, name, &Holding::name);
  return found == tensors.end() ? nullptr : &snapshot.data[static_cast<size_t>(found - tensors.begin())][0];
}

// This rank's values in double precision, as real numbers; zeros where it has none.
at::Tensor addend_of(const Holding& what, Snapshot& snapshot) {
  const bool is_complex = c10::isComplexType(what.dtype);
  const auto dtype = is_complex ? at::kComplexDouble : at::kDouble;
  const auto* data = data_of(snapshot, what.name);
  const auto values =
      data ? data->resolve_conj().resolve_neg().to(at::kCPU, dtype, /*non_blocking=*/false, /*copy=*/true).contiguous()
           : at::zeros(what.sizes, at::TensorOptions(dtype));
  return is_complex ? at::view_as_real(values) : values;
}

// The snapshot aliases the caller's tensors, which stay as they are.
void take_means(const Ranks& ranks, const std::vector<Differing>& differing, const SavePlan& plan, Snapshot& snapshot) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> sums(differing.size());
  ranks.all("prepare the means of what differs", [&] { // before the sums: an error here is one of all ranks
    for (size_t i = 0; i < differing.size(); ++i) {
      const auto& what = plan.tensors[differing[i].position].what;
      if (c10::isFloatingType(what.dtype) || c10::isComplexType(what.dtype)) sums[i] = addend_of(what, snapshot);
    }
  });
  for (size_t i = 0; i < differing.size(); ++i) {
    if (!sums[i].defined()) continue;
    const auto& what = plan.tensors[differing[i].position].what;
    ranks.sum(sums[i], "mean of \"" + what.name + "\"");
    auto* data = data_of(snapshot, what.name);
    if (!data) continue;
    sums[i].div_(static_cast<double>(differing[i].ranks.size()));
    *data = (c10::isComplexType(what.dtype) ? at::view_as_complex(sums[i]) : sums[i]).to(what.dtype);
  }
}

// Each tensor stays the lowest rank's, and each of the others gets one of its own, under a name that is free.
SavePlan keep_each(const std::vector<Differing>& differing, SavePlan plan) {
  std::set<std::string> taken;
  for (const auto& tensor : plan.tensors) {
    taken.insert(tensor.what.name);
    taken.insert(tensor.what.aliases.begin(), tensor.what.aliases.end());
  }
  for (const auto& value : plan.values) taken.insert(value.first);
  for (const auto& [position, ranks] : differing) {
    for (const auto rank : std::span(ranks).subspan(1)) {
      auto copy = plan.tensors[position];
      copy.what.copy = {copy.what.name, rank};
      do {
        copy.what.name += ".rank" + std::to_string(rank);
      } while (!taken.insert(copy.what.name).second);
      copy.what.aliases.clear();
      for (auto& part : copy.parts) part.rank = rank;
      plan.tensors.push_back(std::move(copy));
    }
  }
  return plan;
}

// A training saves the same names again and again.
void warn_once(const std::vector<std::string>& names, const std::string& target) {
  static std::mutex mutex;
  static std::set<std::vector<std::string>> warned;
  {
    const std::lock_guard lock(mutex);
    if (!warned.insert(names).second) return;
  }
  TORCH_WARN(
      "checkpoint: plain tensors differ between ranks, and ", target, " keeps the lowest rank's:", listing(names),
      "\nset_differing_tensors, or the save's option differing_tensors, chooses another way; further saves of the same names "
      "warn no more");
}

} // namespace

std::string name_of(checkpoint::DifferingTensors choice) {
  switch (choice) {
    case checkpoint::DifferingTensors::kWarn: return "kWarn";
    case checkpoint::DifferingTensors::kLowestRank: return "kLowestRank";
    case checkpoint::DifferingTensors::kMean: return "kMean";
    case checkpoint::DifferingTensors::kEachRank: return "kEachRank";
    case checkpoint::DifferingTensors::kError: break;
  }
  return "kError";
}

checkpoint::DifferingTensors choice_for_whole_tensors(const std::optional<checkpoint::DifferingTensors>& chosen,
                                                      const std::string& format) {
  const auto choice = chosen.value_or(checkpoint::differing_tensors());
  TORCH_CHECK(choice != checkpoint::DifferingTensors::kEachRank, format,
              " holds a tensor once, so differing_tensors cannot be kEachRank",
              chosen ? "" : ", which set_differing_tensors chose: set another in its options");
  return choice;
}

std::optional<SavePlan> settle_differences(const Ranks& ranks, checkpoint::DifferingTensors choice, const std::string& target,
                                           const SavePlan& plan, Snapshot& snapshot) {
  if (ranks.size() == 1) return std::nullopt;
  if (choice == checkpoint::DifferingTensors::kLowestRank) return std::nullopt;
  const auto differing = find_differing(ranks, snapshot, plan);
  if (differing.empty()) return std::nullopt;
  if (choice == checkpoint::DifferingTensors::kEachRank) return keep_each(differing, plan);
  const auto names = names_of(differing, plan);
  TORCH_CHECK(choice != checkpoint::DifferingTensors::kError, "checkpoint: plain tensors differ between ranks:", listing(names));
  if (choice == checkpoint::DifferingTensors::kMean) take_means(ranks, differing, plan, snapshot);
  if (choice == checkpoint::DifferingTensors::kWarn && ranks.rank() == 0) warn_once(names, target);
  return std::nullopt;
}

} // namespace tessera::internal

namespace tessera::checkpoint {

namespace {

std::atomic<DifferingTensors> chosen{DifferingTensors::kWarn};

} // namespace

void set_differing_tensors(DifferingTensors choice) { chosen = choice; }

DifferingTensors differing_tensors() { return chosen; }

} // namespace tessera::checkpoint
