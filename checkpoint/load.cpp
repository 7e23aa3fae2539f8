#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checksum.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/parallel.h>
#include <tessera/checkpoint/pieces.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/reader.h>

#include <algorithm>
#include <iterator>
#include <optional>

namespace tessera::checkpoint {

namespace {

constexpr int64_t kJobBytes = int64_t{64} << 20;

// Names that no rank uses.
std::vector<std::string> unused_everywhere(const std::vector<std::string>& messages) {
  std::vector<std::string> common;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    std::vector<std::string> names;
    const auto json = parse_json(messages[rank], "checkpoint: a rank's message");
    for (const auto& name : json["unused"]) names.push_back(name.get<std::string>());
    std::sort(names.begin(), names.end());
    if (rank == 0) {
      common = std::move(names);
      continue;
    }
    std::vector<std::string> both;
    std::set_intersection(common.begin(), common.end(), names.begin(), names.end(), std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

void check_fits(const LoadPlan& plan, const LoadOptions& options) {
  std::string problems;
  if (!plan.missing.empty() && !options.allow_missing) problems += "\nnot in the checkpoint:" + listing(plan.missing);
  if (!plan.mismatches.empty()) problems += "\ndifferent in the checkpoint:" + listing(plan.mismatches);
  TORCH_CHECK(problems.empty(), "the state does not fit the checkpoint:", problems);
}

// Tensors that share memory here and were saved apart must be equal, or one of the saved ones would be lost silently.
void check_tied(const TensorRead& read, const std::vector<Piece>& pieces, Reader& reader) {
  for (size_t i = 1; i < read.saved.size(); ++i) {
    for (const auto& piece : pieces) {
      const Piece other{piece.box, at::empty_like(piece.data, at::MemoryFormat::Contiguous)};
      reader.read(*read.saved[i], other);
      TORCH_CHECK(at::equal(other.data, piece.data), "\"", read.entry->name, "\" is tied to \"", read.saved[i]->name,
                  "\", but the checkpoint holds different values for \"", read.saved[0]->name, "\" and \"", read.saved[i]->name,
                  "\"");
    }
  }
}

// A part of a tensor that one thread reads.
struct ReadJob {
  const IndexedTensor* from;
  Piece to;
};

// Splits what this rank holds into jobs of about the same size.
std::vector<ReadJob> jobs_of(const LoadPlan& plan, std::vector<std::vector<Piece>>& pieces) {
  std::vector<ReadJob> jobs;
  for (const auto& read : plan.tensors) {
    const auto& tensor = std::get<at::Tensor>(read.entry->content);
    pieces.push_back(pieces_of(read.entry->name, tensor));
    for (const auto& piece : pieces.back()) {
      for (auto& box : split(piece.box, static_cast<int64_t>(tensor.element_size()), kJobBytes)) {
        auto within = box;
        for (size_t d = 0; d < box.offsets.size(); ++d) within.offsets[d] -= piece.box.offsets[d];
        auto data = narrow(piece.data, within);
        jobs.push_back({read.saved[0], {std::move(box), std::move(data)}});
      }
    }
  }
  return jobs;
}

void read_tensors(const LoadPlan& plan, Reader& reader) {
  const c10::NoGradGuard no_grad;
  std::vector<std::vector<Piece>> pieces; // of each tensor of the plan
  const auto jobs = jobs_of(plan, pieces);
  for_each_in_parallel(std::ssize(jobs), [&](int64_t job) {
    const c10::NoGradGuard not_recorded; // counts for one thread
    reader.read(*jobs[static_cast<size_t>(job)].from, jobs[static_cast<size_t>(job)].to);
  });
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    mark_written(std::get<at::Tensor>(plan.tensors[i].entry->content));
    check_tied(plan.tensors[i], pieces[i], reader);
  }
}

} // namespace

LoadReport load(StateDict& state, const std::filesystem::path& dir, const LoadOptions& options) {
  const Ranks ranks;
  const auto what = dir.string();
  std::optional<Opened> opened;
  LoadPlan plan;
  int64_t bytes_read = 0;
  const auto messages = ranks.all("load " + what, [&] {
    opened = open_checkpoint(dir);
    const auto& index = opened->index;
    const auto saved = index.contents();
    for (const auto& binding : state.bindings()) binding->before_load(state, saved);
    plan = plan_load(state, index, options);
    check_fits(plan, options);
    return dump_json({{"unused", plan.unused}, {"index", to_hex(index.checksum)}}, "checkpoint");
  });
  ranks.all("load " + what, [&] {
    const auto first = parse_json(messages[0], what), mine = parse_json(messages[static_cast<size_t>(ranks.rank())], what);
    TORCH_CHECK(first["index"] == mine["index"], dir.string(), " is not the same checkpoint here as on rank 0");
    const auto unused = unused_everywhere(messages);
    TORCH_CHECK(options.allow_unused || unused.empty(),
                "the checkpoint holds more than the state (LoadOptions::allow_unused ignores it):", listing(unused));
    Reader reader(opened->folder, opened->index, options.verify && opened->index.has_checksums);
    read_tensors(plan, reader);
    bytes_read = reader.bytes_read();
    return std::string();
  });
  for (const auto& [name, value] : plan.values) state.set(name, value);
  for (const auto& binding : state.bindings()) binding->after_load(state);
  return {plan.missing, unused_everywhere(messages), bytes_read};
}

LoadReport load(StateDict&& state, const std::filesystem::path& dir, const LoadOptions& options) {
  return load(state, dir, options);
}

} // namespace tessera::checkpoint
