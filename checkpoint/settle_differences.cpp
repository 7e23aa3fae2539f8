#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/parallel.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/settle_differences.h>
#include <tessera/collectives/current_stream.h>
#include <tessera/collectives/listing.h>

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

using Sums = std::map<std::string, std::string>; // plain tensor → checksum of this rank's values

constexpr size_t kSummedAtOnce = size_t{16} << 20;

// A part of a plain tensor that one thread reads.
struct SumJob {
  const at::Tensor* tensor;
  size_t begin, bytes;
  std::optional<c10::Stream> stream; // of the tensor
  uint64_t sum = 0;
};

void run(SumJob& job) {
  const c10::OptionalStreamGuard guard(job.stream);
  const auto data = is_plain_memory(*job.tensor) ? *job.tensor : job.tensor->resolve_conj().resolve_neg().contiguous().cpu();
  job.sum = checksum(static_cast<const char*>(data.const_data_ptr()) + job.begin, job.bytes);
}

// The jobs of one tensor follow each other. One that has to be copied first is a job of its own.
std::vector<SumJob> jobs_of(const Snapshot& snapshot) {
  std::vector<SumJob> jobs;
  for (size_t i = 0; i < snapshot.data.size(); ++i) {
    if (!snapshot.state.tensors[i].mesh.empty() || snapshot.data[i].empty()) continue;
    const auto& tensor = snapshot.data[i][0];
    const auto stream = current_stream_if_any(tensor.device());
    const auto bytes = tensor.nbytes(), step = is_plain_memory(tensor) ? kSummedAtOnce : bytes;
    for (size_t begin = 0; begin < bytes; begin += step) jobs.push_back({&tensor, begin, std::min(step, bytes - begin), stream});
  }
  return jobs;
}

Sums sums_of(const Snapshot& snapshot) {
  auto jobs = jobs_of(snapshot);
  for_each_in_parallel(std::ssize(jobs), [&](int64_t i) {
    const c10::NoGradGuard no_grad; // counts for one thread
    run(jobs[static_cast<size_t>(i)]);
  });
  std::unordered_map<const at::Tensor*, std::string> of_tensor;
  for (const auto& job : jobs) of_tensor[job.tensor] += to_hex(job.sum);
  Sums sums;
  for (size_t i = 0; i < snapshot.data.size(); ++i) {
    if (snapshot.data[i].empty()) continue;
    const auto found = of_tensor.find(&snapshot.data[i][0]);
    if (found != of_tensor.end()) sums[snapshot.state.tensors[i].name] = to_hex(checksum(found->second));
  }
  return sums;
}

// A tensor of which not all holders have the same values.
struct Differing {
  size_t position; // in the plan
  std::vector<int> ranks;
};

std::vector<Differing> find_differing(const Ranks& ranks, const Snapshot& snapshot, const SavePlan& plan) {
  const std::string step = "compare what the ranks hold", source = "checkpoint: a rank's message";
  std::string text;
  const auto summaries = ranks.all(step, [&] {
    text = dump_json(Json(sums_of(snapshot)), source);
    return to_hex(checksum(text));
  });
  if (std::ranges::all_of(summaries, [&](const std::string& sum) { return sum == summaries[0]; })) return {};
  std::vector<Sums> all;
  for (const auto& message : ranks.all(step, [&] { return text; })) {
    const auto json = parse_json(message, source);
    auto& sums = all.emplace_back();
    for (const auto& [name, sum] : JsonView(json, source).fields()) sums[name] = sum.string();
  }
  std::vector<Differing> differing;
  for (size_t position = 0; position < plan.tensors.size(); ++position) {
    Differing found{position, {}};
    bool same = true;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const auto& sums = all[static_cast<size_t>(rank)];
      const auto sum = sums.find(plan.tensors[position].what.name);
      if (sum == sums.end()) continue;
      found.ranks.push_back(rank);
      same = same && sum->second == all[static_cast<size_t>(found.ranks[0])].at(sum->first);
    }
    if (!same) differing.push_back(std::move(found));
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
