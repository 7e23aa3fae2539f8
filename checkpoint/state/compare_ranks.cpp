#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <tessera/base/current_stream.h>
#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/checkpoint/bytes/parallel.h>
#include <tessera/checkpoint/state/compare_ranks.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <unordered_map>

namespace tessera::internal {

namespace {

using Sums = std::map<std::string, std::string>; // name → checksum of this rank's values

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
std::vector<SumJob> jobs_of(const ComparedTensors& tensors) {
  std::vector<SumJob> jobs;
  for (const auto& [name, tensor] : tensors) {
    const auto stream = current_stream_if_any(tensor.device());
    const auto bytes = tensor.nbytes(), step = is_plain_memory(tensor) ? kSummedAtOnce : bytes;
    for (size_t begin = 0; begin < bytes; begin += step) jobs.push_back({&tensor, begin, std::min(step, bytes - begin), stream});
  }
  return jobs;
}

Sums sums_of(const ComparedTensors& tensors) {
  auto jobs = jobs_of(tensors);
  for_each_in_parallel(std::ssize(jobs), [&](int64_t i) {
    const c10::NoGradGuard no_grad; // counts for one thread
    run(jobs[static_cast<size_t>(i)]);
  });
  std::unordered_map<const at::Tensor*, std::string> of_tensor;
  for (const auto& job : jobs) of_tensor[job.tensor] += to_hex(job.sum);
  Sums sums;
  for (const auto& [name, tensor] : tensors) {
    const auto found = of_tensor.find(&tensor);
    if (found != of_tensor.end()) sums[name] = to_hex(checksum(found->second));
  }
  return sums;
}

} // namespace

std::map<std::string, RankDifference> compare_ranks(const Ranks& ranks, const std::function<ComparedTensors()>& read) {
  const std::string step = "compare what the ranks hold", source = "checkpoint: a rank's message";
  std::string text;
  const auto summaries = ranks.all(step, [&] {
    text = dump_json(Json(sums_of(read())), source);
    return to_hex(checksum(text));
  });
  if (std::ranges::all_of(summaries, [&](const std::string& sum) { return sum == summaries[0]; })) return {};
  std::map<std::string, RankDifference> found;
  Sums firsts; // of the lowest rank that has the name
  int rank = 0;
  for (const auto& message : ranks.all(step, [&] { return text; })) {
    const auto json = parse_json(message, source);
    for (const auto& [name, sum] : JsonView(json, source).fields()) {
      auto& difference = found[name];
      difference.ranks.push_back(rank);
      if (firsts.try_emplace(name, sum.string()).first->second != sum.string()) difference.others.push_back(rank);
    }
    ++rank;
  }
  std::erase_if(found, [](const auto& item) { return item.second.others.empty(); });
  return found;
}

} // namespace tessera::internal
